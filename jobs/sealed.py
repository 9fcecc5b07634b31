"""Encrypts the secret environment variables of a job. The hub encrypts the variables when it
submits a job for a webhook, and the runner decrypts the variables when it starts this job. Both use
the same Fernet key (a symmetric key of the library `cryptography`).

The spec holds the variables only in encrypted form. So nobody can read the secrets in the database,
in `spec.json` or in lists of jobs. Only the job's process gets the decrypted variables.
"""

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import SealBroken


def seal(variables: Mapping[str, str], key: bytes) -> str:
    """Encrypt the variables. Returns the text for `JobSpec.sealed_env`. `key` must be the runner's
    Fernet key."""
    return Fernet(key).encrypt(json.dumps(dict(variables)).encode()).decode()


def unseal(token: str | None, key: bytes | None) -> dict[str, str]:
    """Decrypt the variables; a token of None has none. Raises SealBroken if there is no `key`, or
    if `token` was not encrypted with it."""
    if token is None:
        return {}
    if key is None:
        raise SealBroken(
            "The job's spec has secrets, but this runner has no key to decrypt them: start the "
            "runner with the key that encrypted them."
        )
    try:
        variables: dict[str, str] = json.loads(Fernet(key).decrypt(token.encode()))
    except InvalidToken:
        raise SealBroken(
            "The job's secrets were encrypted with another key: start the hub and the runner with "
            "the same key, or submit the job again with its secrets."
        ) from None
    return variables
