"""Reads and creates `tokens.json`. This file has the secrets that the services of one stack share.
Only the owner of the file may read it."""

import json
import os
import secrets
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from cryptography.fernet import Fernet
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.errors import PipelineError


class Tokens(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    hub: str
    """The token that git and the Hugging Face clients send to the hub."""
    admin: str
    """The token for the routes `/admin/*` of the completion server."""
    webhook: str
    """The secret of the stack's webhook: the hub sends it with each delivery, and the receiver
    checks it."""
    key: str
    """The Fernet key that encrypts the secrets in the databases. The same key signs the tokens of
    jobs, and the URLs and tokens with which clients transfer large files."""


def load_tokens(file: Path) -> Tokens:
    """Read the tokens. If the file does not exist, create it first. Raises PipelineError if the
    content of the file or of `PIPELINE_SECRET_KEY` is wrong (see `read_tokens`)."""
    if not file.exists():
        _create(file)
    return read_tokens(file)


def read_tokens(file: Path) -> Tokens:
    """Read the tokens, and create no file.

    If the environment variable `PIPELINE_SECRET_KEY` is set, it replaces the key in the file.
    Raises PipelineError if the file does not exist, or if the content of the file or of the
    variable is wrong.
    """
    try:
        tokens = Tokens.model_validate_json(file.read_bytes())
    except FileNotFoundError:
        raise PipelineError(
            f"{file} does not exist; copy it from the hub's machine, restore it, or get a new one: "
            "pipeline down; pipeline up"
        ) from None
    except ValidationError as error:
        fields = ", ".join(str(problem["loc"][0]) for problem in error.errors() if problem["loc"])
        raise PipelineError(
            f"{file} is not a token file (wrong: {fields or 'not a JSON object'}); restore a "
            "backup, or delete it to get new tokens, which loses the secrets in the databases"
        ) from None
    if key := os.environ.get("PIPELINE_SECRET_KEY"):
        tokens = tokens.model_copy(update={"key": key})
    try:
        Fernet(tokens.key)
    except ValueError:
        raise PipelineError(
            f"{'PIPELINE_SECRET_KEY' if key else f'the key in {file}'} is not a Fernet key (32 "
            "random bytes in URL-safe base64); restore the old one"
        ) from None
    return tokens


def tokens_of_hub(file: Path, hub_url: str) -> Tokens:
    """Read the tokens on another machine than the hub's, where new tokens would be wrong ones.
    Raises PipelineError as `read_tokens`, and if the hub refuses them: with them, a runner would
    fail each job that it takes. If the hub cannot be reached now, they are not checked."""
    import httpx  # only here, because most commands do not need it

    tokens = read_tokens(file)
    with suppress(httpx.TransportError):
        bearer = {"Authorization": f"Bearer {tokens.hub}"}
        asked = httpx.get(f"{hub_url}/api/whoami-v2", headers=bearer, timeout=10, trust_env=False)
        if asked.status_code == 401:
            raise PipelineError(
                f"the hub at {hub_url} refuses the token in {file}; copy this file from the hub's "
                "machine"
            )
    return tokens


def secret_in_shell(file: Path) -> str:
    """A shell expression that reads the webhook secret from the file. hotpush prints some shell
    commands for the user to copy. These shell commands contain this expression instead of the
    secret, so the secret does not get onto the screen or into a log."""
    code = 'import json, sys; print(json.load(open(sys.argv[1]))["webhook"])'
    return f"\"$(python3 -c '{code}' {file.parent.name}/{file.name})\""


def _create(file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    tokens = Tokens(
        hub=f"hf_{secrets.token_hex(20)}",
        admin=secrets.token_urlsafe(32),
        webhook=secrets.token_urlsafe(32),
        key=Fernet.generate_key().decode(),
    )
    # Only the owner may read a temporary file.
    with NamedTemporaryFile("w", dir=file.parent, prefix=f".{file.name}.") as draft:
        json.dump(tokens.model_dump(), draft, indent=2)
        draft.flush()
        os.fsync(draft.fileno())
        # Use a link, because a rename would overwrite an existing file. If two processes create the
        # tokens at the same time, only the first link succeeds. Both processes then read the same
        # tokens.
        with suppress(FileExistsError):
            os.link(draft.name, file)
