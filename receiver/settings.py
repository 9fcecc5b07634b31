"""What can be set on a receiver. It is given to the server; nothing here reads a file."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from receiver.errors import AddressUnavailable
from receiver.verify import ProofScheme


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from error
    return pattern


class ReceiverSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Where to listen. Anything beyond this machine needs a secret on every handler."""
    port: int = Field(default=7860, ge=0, le=65535)
    """0 takes a free one, for a receiver on its own; a stack needs a number."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    """How senders reach this receiver, when that is not `http://host:port`."""
    tunnel: Annotated[str, Field(min_length=1)] | None = None
    """What gives it a public URL: `ssh://user@host[:port]`, or a command that prints the URL, as in
    `cloudflared tunnel --url http://{address}`. Needs a secret on every handler."""
    tunnel_url_pattern: Annotated[str, AfterValidator(_regular_expression)] = r"https://[\w.-]+"
    """A regular expression: its first match in the output of that command is the public URL."""
    tunnel_lifetime_seconds: float = Field(default=72 * 3600.0, gt=0)
    """How long the other side keeps a link; it is renewed before."""
    proof: ProofScheme = "secret"
    """What a delivery must carry to be let in, and with it whose events are understood."""
    max_body_bytes: int = Field(default=5 * 1024 * 1024, ge=1024)
    """A larger body is answered 413, unread."""
    body_timeout_seconds: float = Field(default=15.0, gt=0)
    """A body that is not here by then is answered 408."""
    deliveries_path: Path = Path(".pipeline/receiver.db")
    """Where the deliveries of durable handlers wait."""
    shutdown_seconds: int = Field(default=10, ge=0)
    """How long a stopping server waits for handlers that are at work."""
    remembered_deliveries: int = Field(default=10_000, ge=0)
    """For so many delivery ids a repeated delivery gets the first answer, without a second call."""


def settings_of_the_environment() -> ReceiverSettings:
    """For a script that names none: the defaults, but listening where Gradio's variables say, as
    the receivers of `huggingface_hub` do. Raises `AddressUnavailable`."""
    variables = {"host": "GRADIO_SERVER_NAME", "port": "GRADIO_SERVER_PORT"}
    given = {key: os.environ[name] for key, name in variables.items() if os.environ.get(name)}
    try:
        return ReceiverSettings.model_validate(given)
    except ValidationError:
        raise AddressUnavailable(
            f"GRADIO_SERVER_PORT={given['port']} is no port from 0 to 65535."
        ) from None
