"""What can be set on a receiver. It is given to the server; nothing here reads a file."""

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from receiver.verify import ProofScheme


class ReceiverSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Where to listen. Anything beyond this machine needs a secret on every handler."""
    port: int = Field(default=7860, ge=0, le=65535)
    """0 takes a free one."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    """How senders reach this receiver, when that is not `http://host:port`."""
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
