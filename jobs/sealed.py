"""Variables that a job's spec carries encrypted (Fernet), from who submits it to its runner.

The database, `spec.json` and every listing show the token only; the process gets the variables.
"""

import json
from collections.abc import Mapping

from cryptography.fernet import Fernet, InvalidToken

from jobs.errors import SealBroken


def seal(variables: Mapping[str, str], key: bytes) -> str:
    """What goes into `JobSpec.sealed_env`. `key` is a Fernet key, the runner's too."""
    return Fernet(key).encrypt(json.dumps(dict(variables)).encode()).decode()


def unseal(token: str, key: bytes) -> dict[str, str]:
    """Raises SealBroken for a token that was not made with `key`."""
    try:
        variables: dict[str, str] = json.loads(Fernet(key).decrypt(token.encode()))
    except InvalidToken:
        raise SealBroken(
            "Its secrets were encrypted under another key than the one here: start hub and runner "
            "with one key, or submit the job again with its secrets."
        ) from None
    return variables
