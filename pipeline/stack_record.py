"""`stack.json`: what a running stack tells other commands: its processes and their addresses."""

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.launchers.process import ProcessIdentity, is_alive
from pipeline.paths import Home
from pipeline.settings import settings_digest, settings_file


class Child(BaseModel):
    """A service as `stack.json` records it."""

    model_config = ConfigDict(frozen=True)

    name: str
    process: ProcessIdentity | None
    """None while the child is down and waits for its restart."""
    url: str | None = None
    started_at: float | None = None
    """Seconds since the epoch."""
    num_restarts: int = 0
    is_silent: bool = False
    """Whether it leaves probes unanswered. If that lasts, the stack kills and restarts it."""
    last_end: str | None = None
    """How the process before this one ended; None if there was none."""


class StackRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    process: ProcessIdentity
    started_at: float
    """Seconds since the epoch."""
    is_ready: bool
    """Whether every child has answered, and the hub has the webhook that posts to the receiver."""
    settings_digest: str | None = None
    """The digest of the settings file when the children were started."""
    children: tuple[Child, ...] = ()


def read_stack(home: Home) -> StackRecord | None:
    """The stack that runs in this state folder; None if no stack runs in it."""
    record = last_record(home)
    return record if record is not None and is_alive(record.process) else None


def last_record(home: Home) -> StackRecord | None:
    """What the stack wrote that was up last, if it was killed; None if it was stopped."""
    try:
        return StackRecord.model_validate_json(home.stack_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def stale_settings(home: Home) -> str | None:
    """A warning if the settings file has changed since the stack was started; None if it has
    not."""
    record = read_stack(home)
    if record is None or settings_digest() in (None, record.settings_digest):
        return None
    return (
        f"{settings_file()} has changed since the stack was started, and the stack still uses the "
        "old settings; to restart it: pipeline down && pipeline up --detach"
    )
