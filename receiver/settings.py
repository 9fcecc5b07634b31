"""The settings of a receiver. The caller passes them to the server; nothing here reads a file."""

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
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


class ReceiverSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. If other machines can reach it, every handler needs a secret."""
    port: int = Field(default=7860, ge=0, le=65535)
    """The port to listen on. 0 takes a free port; in a stack, the port must be above 0."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    """The URL at which senders reach this receiver, if it is not `http://host:port`."""
    tunnel: Annotated[str, Field(min_length=1)] | None = None
    """The tunnel that opens a public URL: `ssh://user@host[:port]`, or a command that prints the
    URL, for example `cloudflared tunnel --url http://{address}`. With a tunnel, every handler needs
    a secret."""
    tunnel_url_pattern: Annotated[str, AfterValidator(_regular_expression)] = r"https://[\w.-]+"
    """A regular expression. Its first match in the output of a tunnel command is the public URL."""
    tunnel_lifetime_seconds: float = Field(default=72 * 3600.0, gt=0)
    """How long the other side keeps a tunnel open. The tunnel is renewed before this time ends."""
    proof: ProofScheme = "secret"
    """The proof that a delivery must carry. The proof also determines the sender, in whose format
    the events are read."""
    max_body_bytes: int = Field(default=5 * 1024 * 1024, ge=1024)
    """A request with a larger body gets 413, and its body is not read to the end."""
    body_timeout_seconds: float = Field(default=15.0, gt=0)
    """A request whose body has not arrived after this time gets 408."""
    deliveries_path: Path = Path(".pipeline/receiver.db")
    """The database file in which deliveries wait for durable handlers."""
    shutdown_seconds: int = Field(default=10, ge=0)
    """How long the server waits for running handlers when it stops."""
    remembered_deliveries: int = Field(default=10_000, ge=0)
    """How many answers are remembered. A repeated delivery gets its first answer again."""


def settings_of_the_environment() -> ReceiverSettings:
    """The settings for a script that passes no settings. All settings have their defaults, except
    that Gradio's environment variables replace host and port. `huggingface_hub` does the same.

    Raises `AddressUnavailable` for a port that is not a number from 0 to 65535.
    """
    variables = {"host": "GRADIO_SERVER_NAME", "port": "GRADIO_SERVER_PORT"}
    given = {key: os.environ[name] for key, name in variables.items() if os.environ.get(name)}
    try:
        return ReceiverSettings.model_validate(given)
    except ValidationError:
        raise AddressUnavailable(
            f"GRADIO_SERVER_PORT={given['port']} is not a port from 0 to 65535."
        ) from None
