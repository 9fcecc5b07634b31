"""Whether and how a receiver gets a public URL: from what was asked for to a way in."""

import threading
from collections.abc import Sequence
from pathlib import Path

from receiver.errors import TunnelFailed
from receiver.moved_webhooks import Hub, move_webhooks
from receiver.settings import ReceiverSettings
from receiver.tunnel import LONGEST_PAUSE_SECONDS, PublicUrl, Tunnel
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


def remembered_urls(settings: ReceiverSettings, port: int) -> Path:
    """Where a receiver's public URLs stand: those of one folder listen on ports of their own."""
    return settings.deliveries_path.with_name(f"receiver-urls-{port}.json")


def open_tunnel(
    tunnel: str, address: str, settings: ReceiverSettings, remembered: Path, hubs: Sequence[Hub]
) -> Tunnel:
    """Make `address` (`host:port`) public, and keep the webhooks on `hubs` that point to it up to
    date. Raises `TunnelFailed`."""
    opened = Tunnel(
        lambda former: tunnel_command(
            tunnel, address, url_pattern=settings.tunnel_url_pattern, former_url=former
        ),
        lifetime_seconds=settings.tunnel_lifetime_seconds,
        on_url=lambda url: move_webhooks(url, remembered, hubs),
    )
    opened.open()
    return opened


class FixedUrl:
    """The settings' `public_url`, which is kept up elsewhere, as a tunnel that is open already.

    The webhooks on `hubs` that point to a former one are moved in a thread, until that is settled.
    """

    public: PublicUrl | None = None
    """Nothing is known of its lifetime."""

    def __init__(self, url: str, remembered: Path, hubs: Sequence[Hub]) -> None:
        self._url = url.rstrip("/")
        self._remembered = remembered
        self._hubs = hubs
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._move, name="public-url", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give up what is not settled. Idempotent."""
        self._is_closing.set()
        self._thread.join()

    def _move(self) -> None:
        pause = 1.0
        while not move_webhooks(self._url, self._remembered, self._hubs):
            if self._is_closing.wait(pause):
                return
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
