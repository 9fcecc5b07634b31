"""Makes and checks signed URLs, for files of Git LFS, and access tokens, for uploads with `hf_xet`.
Clients send them instead of the hub's token.

Both are signed with HMAC-SHA256. Each kind has its own key, derived from the hub's secret key, so
the signature of one kind is not valid for the other.
"""

import hmac
import json
import time

from starlette.requests import Request

from pipeline.hub.errors import Forbidden, Unauthorized

LIFETIME_SECONDS = 6 * 3600
"""How long a signed URL or an access token is valid. The hub checks this only when a transfer
begins, so the transfer itself may take longer."""


class Signer:
    def __init__(self, secret_key: bytes, purpose: str) -> None:
        self._key = hmac.digest(secret_key, f"hub {purpose}".encode(), "sha256")

    def signature(self, *facts: str | int) -> str:
        # As JSON, so that two different lists of facts never give the same text.
        return hmac.digest(self._key, json.dumps(facts).encode(), "sha256").hex()

    def matches(self, signature: str, *facts: str | int) -> bool:
        """Whether the signature is right. For every wrong signature this takes the same time, so
        that nobody can guess the right one bit by bit."""
        expected = self.signature(*facts).encode()
        return hmac.compare_digest(signature.encode("utf-8", "replace"), expected)


class SignedUrls:
    """Makes and checks signed URLs. Each is for one method, one path and one size."""

    def __init__(self, secret_key: bytes) -> None:
        self._signer = Signer(secret_key, "signed URL")

    def sign(self, method: str, path: str, size: int) -> str:
        """The path with a query that has the size, the time at which the URL expires (in seconds
        since the epoch) and the signature. `size` is in bytes."""
        expires = int(time.time()) + LIFETIME_SECONDS
        signature = self._signer.signature(method, path, size, expires)
        return f"{path}?size={size}&expires={expires}&signature={signature}"

    def check(self, request: Request) -> int:
        """The signed size in bytes. Raises Forbidden if the signature is wrong or the URL has
        expired."""
        method = "GET" if request.method == "HEAD" else request.method
        size, expires = (_number(request.query_params.get(name)) for name in ("size", "expires"))
        signature = request.query_params.get("signature", "")
        path: str = request.scope["path"]
        if not self._signer.matches(signature, method, path, size, expires):
            raise Forbidden(
                "The signature of this URL is wrong: ask the batch route of Git LFS for a new URL."
            )
        if expires < time.time():
            raise Forbidden("This URL has expired: ask the batch route of Git LFS for a new URL.")
        return size


class AccessTokens:
    """Makes and checks access tokens. Each is for one Xet store (`xet_store.py`) of one
    repository."""

    def __init__(self, secret_key: bytes) -> None:
        self._signer = Signer(secret_key, "xet access token")

    def make(self, repository_id: str, store_id: str, expires: int) -> str:
        return f"xet_{expires}_{self._signer.signature(repository_id, store_id, expires)}"

    def check(self, request: Request, repository_id: str, store_id: str) -> None:
        """Raises Unauthorized if the token is wrong or has expired. The client then asks for a new
        token."""
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        kind, _, rest = token.partition("_")
        text, _, signature = rest.partition("_")
        expires = _number(text)
        is_ours = self._signer.matches(signature, repository_id, store_id, expires)
        if not is_ours or (scheme.lower(), kind) != ("bearer", "xet"):
            raise Unauthorized(
                "This is not an access token of this hub for this Xet store: ask for a new one."
            )
        if expires < time.time():
            raise Unauthorized("This access token has expired: ask for a new one.")


def _number(text: str | None) -> int:
    """The number in `text`, or -1 if there is none. No signature is valid for -1, because the hub
    never signs -1."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) < 19 else -1
