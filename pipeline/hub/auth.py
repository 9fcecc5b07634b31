"""Who may come in: one token, over Bearer (API clients) or Basic with any user name (git)."""

import base64
import binascii
import secrets
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import Scope

from pipeline.hub.errors import Forbidden, Unauthorized
from receiver.cross_site import other_site

_READING = frozenset({"GET", "HEAD", "OPTIONS"})


def check_token(headers: Iterable[tuple[bytes, bytes]], token: str) -> None:
    """Raises Unauthorized unless the request carries `token`. Compares in constant time."""
    given = [value for name, value in headers if name == b"authorization"]
    if not given:
        raise Unauthorized(
            "This hub needs a token: set HF_TOKEN, or run `pipeline env` for the whole environment."
        )
    if len(given) > 1 or not secrets.compare_digest(_token(given[0]), token.encode()):
        raise Unauthorized("Invalid credentials in Authorization header")


def check_site(scope: Scope) -> None:
    """Raises Forbidden for a change that a page of another site asks for.

    A browser that knows the token adds it to such requests too.
    """
    site = None if scope["method"] in _READING else other_site(Headers(scope=scope))
    if site is not None:
        raise Forbidden(
            f"The browser sends this for {site}, and only this hub's own pages may change "
            "anything: use `pipeline`, `hf` or another client with the hub's token."
        )


def _token(value: bytes) -> bytes:
    scheme, _, credentials = value.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() == b"basic":
        try:
            return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return b""
