"""Tells which requests a browser sends for a page of another site. Reads headers only.

Such a page reaches servers that only the user's machine can reach, and the browser adds the user's
login. A page may also give its own name the address 127.0.0.1 (DNS rebinding). The browser then
takes the server for the page's own, but still sends the page's name as `Host`.
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit


def other_site(headers: Mapping[str, str]) -> str | None:
    """The site whose page makes a browser send the request; None for the server's own pages, and
    for clients that are no browsers.

    The names in `headers` must be lower case.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != _host(headers).lower():
        return origin
    # Browsers do not send `Origin` with every request; `none` means that the user typed the URL.
    relation = headers.get("sec-fetch-site", "none")
    return None if relation in ("same-origin", "none") else f"a {relation} page"


def other_host(
    headers: Mapping[str, str], server: tuple[str, int | None] | None, names: Collection[str]
) -> str | None:
    """The `Host` of a request that came over loopback, if it is neither loopback nor in `names`.

    `server` is the local end of the connection, as ASGI gives it.
    """
    if server is None or not _is_loopback(server[0]):
        return None
    host = _host(headers)
    name = host_name(f"//{host}")
    is_own = name == "localhost" or _is_loopback(name) or (name != "" and name in names)
    return None if is_own else host


def host_name(url: str) -> str:
    """The name in the URL, in lower case; empty if the URL has none."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _host(headers: Mapping[str, str]) -> str:
    return headers.get("host", "")


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
