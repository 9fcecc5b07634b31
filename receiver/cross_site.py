"""Finds requests that a browser sends for a page of another site. Reads headers only.

Such a page is dangerous: through the user's browser it reaches servers that only the user's machine
can reach, and the browser adds the user's login. The owner of a page can also let the page's host
name resolve to 127.0.0.1 (DNS rebinding). The browser then believes that this server belongs to the
page, but it still sends the page's host name as `Host`.
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit


def other_site(headers: Mapping[str, str]) -> str | None:
    """Names the other site whose page made a browser send this request.

    None if a page of this server sent the request, or a client that is not a browser. The names in
    `headers` must be lower case.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != _host(headers).lower():
        return origin
    # Browsers do not send `Origin` with every request, so look at `Sec-Fetch-Site` too. Its value
    # `none` means that no page caused the request: the user typed the URL, for example.
    relation = headers.get("sec-fetch-site", "none")
    return None if relation in ("same-origin", "none") else f"a {relation} page"


def other_host(
    headers: Mapping[str, str], server: tuple[str, int | None] | None, names: Collection[str]
) -> str | None:
    """The `Host` header of a request that came over loopback, if the header names another host.

    None if the request did not come over loopback, or if the header names loopback or one of
    `names`. `server` is the local end of the connection, as in an ASGI scope.
    """
    if server is None or not _is_loopback(server[0]):
        return None
    host = _host(headers)
    name = host_name(f"//{host}")
    is_own = name == "localhost" or _is_loopback(name) or (name != "" and name in names)
    return None if is_own else host


def host_name(url: str) -> str:
    """The host name in the URL, in lower case; empty if the URL has no host name."""
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
