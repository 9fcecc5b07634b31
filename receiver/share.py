"""Whether and how a receiver gets a public URL: from what was asked for to an open tunnel."""

from collections.abc import Sequence

from receiver.errors import TunnelFailed
from receiver.moved_webhooks import Hub, move_webhooks
from receiver.settings import ReceiverSettings
from receiver.tunnel import Tunnel
from receiver.tunnel_command import tunnel_command


def tunnel_to_open(share: bool | str, settings: ReceiverSettings) -> str | None:
    """What `share` asks for; None where no tunnel is wanted. Raises `TunnelFailed`."""
    if isinstance(share, str):
        return share
    if share and settings.tunnel is None and settings.public_url is None:
        raise TunnelFailed(
            "share=True needs a tunnel: pass share='ssh://user@host[:port]' or a command that"
            " prints a public URL (share='cloudflared tunnel --url http://{address}'), or set"
            " `tunnel` in the receiver's settings (`pipeline receiver --tunnel`). If this server"
            " can be reached already, set `public_url` there (`--public-url`)."
        )
    return settings.tunnel if share else None


def open_tunnel(
    tunnel: str, address: str, settings: ReceiverSettings, hubs: Sequence[Hub]
) -> Tunnel:
    """Make `address` (`host:port`) public, and keep the webhooks on `hubs` that point to it up to
    date. Raises `TunnelFailed`."""
    remembered = settings.deliveries_path.with_name("receiver-urls.json")
    opened = Tunnel(
        lambda former: tunnel_command(
            tunnel, address, url_pattern=settings.tunnel_url_pattern, former_url=former
        ),
        lifetime_seconds=settings.tunnel_lifetime_seconds,
        on_url=lambda url: move_webhooks(url, remembered, hubs),
    )
    opened.open()
    return opened
