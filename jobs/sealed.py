"""Encrypts the secret variables of a job's spec with Fernet. Only a process that has the runner's
key can decrypt them.

The database, `spec.json` and every listing show only the encrypted token. The job's process gets
the decrypted variables.
"""

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import SealBroken


def seal(variables: Mapping[str, str], key: bytes) -> str:
    """Encrypt the variables. Returns the token for `JobSpec.sealed_env`. `key` must be the runner's
    Fernet key."""
    return Fernet(key).encrypt(json.dumps(dict(variables)).encode()).decode()


def unseal(token: str, key: bytes) -> dict[str, str]:
    """Decrypt the variables. Raises SealBroken if the token was not made with `key`."""
    try:
        variables: dict[str, str] = json.loads(Fernet(key).decrypt(token.encode()))
    except InvalidToken:
        raise SealBroken(
            "The job's secrets were encrypted under another key than the key of this runner: start "
            "the hub and the runner with the same key, or submit the job again with its secrets."
        ) from None
    return variables
