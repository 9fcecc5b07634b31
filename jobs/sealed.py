"""Encrypts secret environment variables: those of a job, and on the hub those of webhooks and
Spaces. The copy of a job that a webhook starts gets the variables of the webhook. The runner
decrypts them when it starts the copy, so the runner and the hub have the same Fernet key (a
symmetric key of the library `cryptography`).

The spec of a job holds the variables only in encrypted form. So nobody can read the secrets in the
database, in `spec.json` or in lists of jobs. Only the job's process gets the decrypted variables.
"""

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import SealBroken


def seal(variables: Mapping[str, str], key: bytes) -> str:
    """Encrypt the variables. Returns the text for `JobSpec.sealed_env`. `key` must be the runner's
    Fernet key."""
    return Fernet(key).encrypt(json.dumps(dict(variables)).encode()).decode()


def unseal(token: str, key: bytes) -> dict[str, str]:
    """Decrypt the variables. Raises SealBroken if `token` was not encrypted with `key`."""
    try:
        variables: dict[str, str] = json.loads(Fernet(key).decrypt(token.encode()))
    except InvalidToken:
        raise SealBroken(
            "The secrets were encrypted with another key: set them again, which for a job is to "
            "submit it again, or start the hub and the runner with the old key."
        ) from None
    return variables
