"""Proofs that the hub hands out, and that work without its token: signed URLs and access tokens.

Each is signed (HMAC-SHA256) with a key that is derived from the hub's for one purpose, so a proof
of one purpose is none for another.
"""

import hmac
import json
import time

from starlette.requests import Request

from pipeline.hub.errors import Forbidden, Unauthorized

LIFETIME_SECONDS = 6 * 3600
"""How long a proof is good. It must be good when a file begins to come, not when it ends."""


class Signer:
    def __init__(self, secret_key: bytes, purpose: str) -> None:
        self._key = hmac.digest(secret_key, f"hub {purpose}".encode(), "sha256")

    def signature(self, *facts: str | int) -> str:
        # As JSON, so that no two lists of facts are the same text.
        return hmac.digest(self._key, json.dumps(facts).encode(), "sha256").hex()

    def matches(self, signature: str, *facts: str | int) -> bool:
        """In a time that does not depend on where the signatures differ."""
        expected = self.signature(*facts).encode()
        return hmac.compare_digest(signature.encode("utf-8", "replace"), expected)


class SignedUrls:
    """URLs for one method, one path and one size each."""

    def __init__(self, secret_key: bytes) -> None:
        self._signer = Signer(secret_key, "signed URL")

    def sign(self, method: str, path: str, size: int) -> str:
        """The path with its proof."""
        expires = int(time.time()) + LIFETIME_SECONDS
        signature = self._signer.signature(method, path, size, expires)
        return f"{path}?size={size}&expires={expires}&signature={signature}"

    def check(self, request: Request) -> int:
        """The size that was signed. Raises Forbidden for what this hub did not sign, and for what
        is too old."""
        method = "GET" if request.method == "HEAD" else request.method
        size, expires = (_number(request.query_params.get(name)) for name in ("size", "expires"))
        signature = request.query_params.get("signature", "")
        path: str = request.scope["path"]
        if not self._signer.matches(signature, method, path, size, expires):
            raise Forbidden(
                "This URL is not as this hub signed it: ask the batch route for a new one."
            )
        if expires < time.time():
            raise Forbidden("This URL has expired: ask the batch route for a new one.")
        return size


class AccessTokens:
    """For one Xet store of one repository each."""

    def __init__(self, secret_key: bytes) -> None:
        self._signer = Signer(secret_key, "xet access token")

    def make(self, repository_id: str, store_id: str, expires: int) -> str:
        return f"xet_{expires}_{self._signer.signature(repository_id, store_id, expires)}"

    def check(self, request: Request, repository_id: str, store_id: str) -> None:
        """Raises Unauthorized, at which the client asks for a new token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        kind, _, rest = token.partition("_")
        text, _, signature = rest.partition("_")
        expires = _number(text)
        is_ours = self._signer.matches(signature, repository_id, store_id, expires)
        if not is_ours or (scheme.lower(), kind) != ("bearer", "xet"):
            raise Unauthorized("This is not an access token of this hub for this store.")
        if expires < time.time():
            raise Unauthorized("This access token has expired: ask for a new one.")


def _number(text: str | None) -> int:
    """-1 for what is none; no URL is signed for that."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else -1
