"""Recognises requests that a page of another site has caused. It looks only at the headers.

A page of another site can make the user's browser send requests to a server that only the user's
machine can reach, and the browser adds the user's login. There are two cases:

- The page sends requests to the address of this server. The browser says in `Origin` or
  `Sec-Fetch-Site` that the page belongs to another site. `other_site` recognises such requests.
- The owner of the page makes the page's own host name resolve to 127.0.0.1 (DNS rebinding). The
  browser then takes this server for the page's server, but it sends the page's host name as `Host`.
  `other_host` recognises such requests.
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit


def other_site(headers: Mapping[str, str]) -> str | None:
    """If a page of another site made a browser send this request: the name of this site, as a text
    for an error message.

    None if the request comes from a page of this server, or from a client that is not a browser.
    The names in `headers` must be in lower case.
    """
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2].lower() != headers.get("host", "").lower():
        return origin
    # Browsers do not send `Origin` with every request, so look at `Sec-Fetch-Site` too. Its value
    # `none` means that no page caused the request: the user typed the URL, for example.
    relation = headers.get("sec-fetch-site", "none")
    return None if relation in ("same-origin", "none") else f"a {relation} page"


def other_host(
    headers: Mapping[str, str], server: tuple[str, int | None] | None, names: Collection[str]
) -> str | None:
    """The `Host` header of a request over loopback, if this host is not loopback and is not one of
    `names`. None for any other request, and for one without `Host`: browsers always send it.

    `server` is the local address of the connection (host and port), as in an ASGI scope. `names`
    are the other host names of this server, in lower case.
    """
    if server is None or not _is_loopback(server[0]):
        return None
    host, name = headers.get("host", ""), named_host(headers)
    is_known = is_loopback_name(name) or (name != "" and name in names)
    return None if host == "" or is_known else host


def named_host(headers: Mapping[str, str]) -> str:
    """The host name in the header `Host`, in lower case. Empty if there is none."""
    return host_name(f"//{headers.get('host', '')}").removesuffix(".")


def is_loopback_name(name: str) -> bool:
    """Whether a browser takes `name`, in lower case, for a name of its own machine."""
    # Browsers resolve `localhost` and names that end in `.localhost` to loopback (RFC 6761, 6.3).
    return name == "localhost" or name.endswith(".localhost") or _is_loopback(name)


def host_name(url: str) -> str:
    """The host name in the URL, in lower case. Empty if the URL has no host name."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False
