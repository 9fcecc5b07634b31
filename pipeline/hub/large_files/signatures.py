"""Makes and checks signed URLs, for files of Git LFS, and access tokens, for uploads with `hf_xet`.
Clients send them instead of the hub's token.

Both are Fernet tokens (AES-128-CBC and HMAC-SHA256): texts that only the hub can make, which hold
what they allow and when they were made.
"""

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

from pipeline.hub.errors import Forbidden, Unauthorized

LIFETIME_SECONDS = 6 * 3600
"""How long a signed URL or an access token is valid. The hub checks this only when a transfer
begins, so the transfer itself may take longer."""


def sign_url(secret_key: bytes, method: str, path: str, size: int) -> str:
    """The path with a query that has the size in bytes and the signature, which is valid for this
    method, path and size only."""
    return f"{path}?size={size}&signature={_make(secret_key, method, path, str(size))}"


def check_url(secret_key: bytes, method: str, path: str, query: Mapping[str, str]) -> int:
    """The signed size in bytes. Raises Forbidden if the signature is wrong or has expired."""
    facts = ("GET" if method == "HEAD" else method, path, query.get("size", ""))
    if not _is_valid(secret_key, query.get("signature", ""), *facts):
        raise Forbidden(
            "The signature of this URL is wrong, or it has expired: ask the batch route of Git LFS "
            "for a new URL."
        )
    return int(query["size"])


def make_access_token(secret_key: bytes, repository_id: str, store_id: str) -> str:
    """The token is valid for one Xet store (`xet_store.py`) of one repository."""
    return _make(secret_key, "xet", repository_id, store_id)


def check_access_token(
    secret_key: bytes, authorization: str, repository_id: str, store_id: str
) -> None:
    """Raises Unauthorized if the token in the header `authorization` is wrong or has expired. The
    client then asks for a new token."""
    scheme, _, token = authorization.partition(" ")
    is_valid = _is_valid(secret_key, token, "xet", repository_id, store_id)
    if scheme.lower() != "bearer" or not is_valid:
        raise Unauthorized(
            "This is not an access token of this hub for this Xet store, or it has expired: ask "
            "for a new one."
        )


def _make(secret_key: bytes, *facts: str) -> str:
    return Fernet(secret_key).encrypt(json.dumps(facts).encode()).decode()


def _is_valid(secret_key: bytes, text: str, *facts: str) -> bool:
    try:
        found = json.loads(Fernet(secret_key).decrypt(text.encode(), ttl=LIFETIME_SECONDS))
    except (InvalidToken, ValueError):
        return False
    return bool(found == list(facts))
