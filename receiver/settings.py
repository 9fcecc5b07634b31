"""The settings of a receiver, and the project of this process: the folder that has the settings
file and the state folder of a stack. This module reads no file: the caller passes the settings to
the server."""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from receiver.errors import AddressUnavailable
from receiver.verify import ProofScheme

SETTINGS_FILE = "pipeline.toml"
STATE_FOLDER = ".pipeline"
PROJECT_OF_SHELL = "PIPELINE_PROJECT"
"""`pipeline env` sets this variable to the folder of its project, so that commands also work in a
clone that is elsewhere. The working folder comes first: after `cd` to another project, all commands
act on that project."""


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from error
    return pattern


class ReceiverSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. If other machines can reach this address, every handler needs a
    secret."""
    port: int = Field(default=7860, ge=0, le=65535)
    """The port to listen on. With 0, the system chooses a free port. If `pipeline up` starts the
    receiver, 0 is not allowed, because the other services must know the port."""
    public_url: Annotated[str, Field(pattern=r"^https?://[^\s/]+")] | None = None
    """The URL at which senders reach this receiver, if `http://host:port` does not work for them.
    With a public URL, every handler needs a secret. A request to the host name of the public URL
    reaches only the handlers, except in a Space."""
    tunnel: Annotated[str, Field(min_length=1)] | None = None
    """The tunnel that opens a public URL: a command that prints the URL, for example
    `cloudflared tunnel --url http://{address}`. In pipeline.toml, a relative path of the program
    starts at the folder of pipeline.toml. With a tunnel, every handler needs a secret."""
    tunnel_url_pattern: Annotated[str, AfterValidator(_regular_expression)] = r"https://[\w.-]+"
    """A regular expression. Its first match in the output of the tunnel is the public URL."""
    proof: ProofScheme = "secret"
    """How a sender must prove that it sent a delivery. This setting also selects the format of the
    events. `github`, `gitea` and `gitlab` select the push events of the service with this name. All
    other values select the format of the Hugging Face Hub."""
    max_body_bytes: int = Field(default=5 * 1024 * 1024, ge=1024)
    """A request with a larger body is answered with status 413, and its body is not read to the
    end."""
    body_timeout_seconds: float = Field(default=15.0, gt=0)
    """If the body of a request has not completely arrived after this time, the request is answered
    with status 408."""
    shutdown_seconds: int = Field(default=10, ge=0)
    """How long the server waits for running handlers when it stops."""
    remembered_deliveries: int = Field(default=10_000, ge=0)
    """How many answers are kept in memory. As long as an answer is kept, a repeated delivery gets
    this answer again. For the handler that starts retrainings, no answers are kept, because the job
    store recognises repeated deliveries."""


def is_space() -> bool:
    """Whether this process runs in a Space."""
    return bool(os.environ.get("SPACE_ID"))


def settings_of_this_process(given: ReceiverSettings | None) -> ReceiverSettings:
    """The settings `given`. What they do not set is found in the environment: in a Space, `host`,
    `port` and `public_url`; and if nothing is given, `host` and `port`, in the variables that the
    receivers of `huggingface_hub` read too (`GRADIO_SERVER_NAME` and `GRADIO_SERVER_PORT`). Raises
    `AddressUnavailable` if a variable is not a valid port or host name."""
    found: dict[str, object] = {}
    if is_space():
        found["host"] = "0.0.0.0"
        if host := os.environ.get("SPACE_HOST"):
            if not re.fullmatch(r"[A-Za-z0-9.-]+(:\d+)?", host):
                raise AddressUnavailable(f"SPACE_HOST={host!r} is not a host name.")
            found["public_url"] = f"https://{host}"
    if given is None or is_space():
        names = {"host": "GRADIO_SERVER_NAME", "port": "GRADIO_SERVER_PORT"}
        found |= {key: os.environ[name] for key, name in names.items() if os.environ.get(name)}
    if given is not None:
        found |= given.model_dump(exclude_unset=True, exclude_none=True)
    try:
        return ReceiverSettings.model_validate(found)
    except ValidationError:
        raise AddressUnavailable(
            f"GRADIO_SERVER_PORT={found['port']} is not a port from 0 to 65535."
        ) from None


def project_folder() -> Path:
    """The nearest folder that has a settings file or a state folder: the working folder or one
    above it. If there is none, the project of this shell, else the working folder."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any(os.path.exists(folder / name) for name in (SETTINGS_FILE, STATE_FOLDER)):
            return folder
    return Path(os.environ.get(PROJECT_OF_SHELL, here))


def state_dir() -> Path:
    """The state folder of the stack: `$PIPELINE_HOME`, or the `.pipeline` of the project."""
    named = os.environ.get("PIPELINE_HOME")
    return Path(named).absolute() if named is not None else project_folder() / STATE_FOLDER
