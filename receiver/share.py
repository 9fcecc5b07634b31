"""Makes a receiver reachable at a public URL: opens a tunnel, or uses the `public_url` of the
settings, which must already lead to the receiver."""

import threading
from collections.abc import Sequence
from pathlib import Path

from receiver.errors import TunnelFailed
from receiver.moved_webhooks import HubCredentials, move_webhooks
from receiver.settings import ReceiverSettings
from receiver.tunnel import LONGEST_PAUSE_SECONDS, PublicUrl, Tunnel
from receiver.tunnel_command import tunnel_command


def tunnel_to_open(share: bool | str, settings: ReceiverSettings) -> str | None:
    """The tunnel to open. None if no tunnel is needed.

    `share` is the argument of `WebhooksServer.launch`. If `share` is a string, the string names the
    tunnel: an `ssh://` address, or a command. If `share` is True, the setting `tunnel` names the
    tunnel. No tunnel is needed if `share` is False, or if `share` is True and only the setting
    `public_url` is set. Raises `TunnelFailed` if `share` is True, but neither `tunnel` nor
    `public_url` is set.
    """
    if isinstance(share, str):
        return share
    if share and settings.tunnel is None and settings.public_url is None:
        raise TunnelFailed(
            "share=True needs a tunnel: pass share='ssh://user@host[:port]' or a command that"
            " prints a public URL (share='cloudflared tunnel --url http://{address}'), or set"
            " `tunnel` in the receiver's settings (`pipeline receiver --tunnel`). If senders can"
            " already reach this server without a tunnel, set `public_url` in the receiver's"
            " settings instead (`pipeline receiver --public-url`)."
        )
    return settings.tunnel if share else None


def remembered_urls(settings: ReceiverSettings, port: int) -> Path:
    """The file that lists the present and the former public URLs of a receiver. Several receivers
    may use the same folder, so the file's name contains the port of the receiver."""
    return settings.deliveries_path.with_name(f"receiver-urls-{port}.json")


def open_tunnel(
    tunnel: str,
    address: str,
    settings: ReceiverSettings,
    remembered: Path,
    hubs: Sequence[HubCredentials],
) -> Tunnel:
    """Open the tunnel to `address` (`host:port`). Raises `TunnelFailed` if this is not possible.

    Whenever the tunnel gets another URL, the webhooks on `hubs` that post to a former URL are
    updated.
    """
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
    """Takes the place of a `Tunnel` if the user has set `public_url`. This class starts no process.

    A thread updates the webhooks on `hubs` that post to a former URL: the thread calls
    `move_webhooks` again and again until `move_webhooks` returns True.
    """

    public: PublicUrl | None = None
    """Always None. In a `Tunnel`, this attribute is the URL with the time at which the URL expires,
    but a fixed URL does not expire."""

    def __init__(self, url: str, remembered: Path, hubs: Sequence[HubCredentials]) -> None:
        self._url = url.rstrip("/")
        self._remembered = remembered
        self._hubs = hubs
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._move, name="public-url", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop updating webhooks. May be called more than once."""
        self._is_closing.set()
        self._thread.join()

    def _move(self) -> None:
        pause = 1.0
        while not move_webhooks(self._url, self._remembered, self._hubs):
            if self._is_closing.wait(pause):
                return
            pause = min(pause * 2, LONGEST_PAUSE_SECONDS)
