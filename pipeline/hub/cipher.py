"""Encrypts secrets, and makes grants: texts that a client sends instead of a token, such as the
signature of a URL."""

import json

from cryptography.fernet import Fernet, InvalidToken

from pipeline.hub.errors import HubError

GRANT_SECONDS = 6 * 3600
"""How long a grant is valid. The hub checks this only when a transfer begins, so the transfer
itself may take longer."""


class Cipher:
    """Uses Fernet (AES-128-CBC and HMAC-SHA256), so only the hub can make and read these texts."""

    def __init__(self, key: bytes) -> None:
        try:
            self._fernet = Fernet(key)
        except ValueError as error:
            raise HubError(
                f"The hub's secret key is not a Fernet key ({error}): "
                "give 32 random bytes in URL-safe base64."
            ) from None

    def encrypt(self, secret: str | None) -> bytes | None:
        return self._fernet.encrypt(secret.encode()) if secret else None

    def decrypt(self, sealed: bytes | None) -> str | None:
        """None if nothing is sealed. Raises HubError if the key is wrong."""
        try:
            return None if sealed is None else self._fernet.decrypt(sealed).decode()
        except InvalidToken:
            raise HubError(
                "The secret was encrypted with another key: set it again, or start the hub with "
                "the old key."
            ) from None

    def grant(self, *facts: str) -> str:
        """A text that allows what the facts say, such as a method, a path and a size."""
        return self._fernet.encrypt(json.dumps(facts).encode()).decode()

    def read_grant(self, text: str) -> list[str] | None:
        """The facts of a grant. None if the hub did not make this text, or made it more than
        `GRANT_SECONDS` ago."""
        try:
            facts: list[str] = json.loads(self._fernet.decrypt(text.encode(), ttl=GRANT_SECONDS))
        except (InvalidToken, ValueError):  # a stored secret is no JSON
            return None
        return facts
