"""Reads `stack.json`. A running stack (the services that `pipeline up` or `pipeline jobs run`
starts) records its processes and their addresses in this file, so that other commands can find the
processes."""

import tomllib
from collections import defaultdict
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.process import ProcessIdentity, is_alive
from pipeline.paths import Home, settings_file
from pipeline.settings import Settings, load_settings


class Child(BaseModel):
    """A service as `stack.json` records it."""

    model_config = ConfigDict(frozen=True)

    name: str
    process: ProcessIdentity | None
    """The process of the service; None while the child is down and waits for its restart."""
    url: str | None = None
    """The address at which the service answers; None for the runner."""
    pipeline: str | None = None
    """The pipeline whose releases a completion server serves; None for any other service."""
    started_at: float | None = None
    """When the process was started, in seconds since the epoch; None while the child is down."""
    num_restarts: int = 0
    is_silent: bool = False
    """Whether the child has stopped answering. If the child gives no answer for `hang_seconds`, the
    stack kills the child and starts it again."""
    last_end: str | None = None
    """How the service ended the last time, for example `ended with SIGKILL`, or why it could not be
    started again. None if it has not ended since the stack was started."""


class StackRecord(BaseModel):
    model_config = ConfigDict(frozen=True)

    process: ProcessIdentity
    started_at: float
    """When the stack was started, in seconds since the epoch."""
    only: str | None = None
    """The option `--only` of `pipeline up`."""
    is_ready: bool
    """Whether every child has answered, and `pipeline up` has set up the webhooks. Always False for
    a stack that `pipeline jobs run` started for one job."""
    children: tuple[Child, ...] = ()


def read_stack(home: Home) -> StackRecord | None:
    """The record of the stack that runs in this state folder; None if no stack runs in it."""
    record = last_record(home)
    return record if record is not None and is_alive(record.process) else None


def last_record(home: Home) -> StackRecord | None:
    """The record in `stack.json`. The record belongs to the stack that runs now, or to a stack that
    was killed: a stack that stops normally removes its record. None if there is no readable
    record."""
    try:
        return StackRecord.model_validate_json(home.stack_file.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


def restart(home: Home) -> str:
    """The command that restarts the stack of this state folder."""
    record = last_record(home)
    only = "" if record is None or record.only is None else f" --only {record.only}"
    return f"pipeline down && pipeline up --detach{only}"


def stale_settings(home: Home) -> str | None:
    """A warning if a value in the settings file has changed since the stack was started. None if
    none has changed, if the file cannot be read, or if no stack runs."""
    values = _values_in(settings_file())
    if read_stack(home) is None or values in (None, _values_in(home.settings_copy)):
        return None
    return (
        f"{settings_file()} has changed since the stack was started, and the stack still uses the "
        f"old settings; to restart it: {restart(home)}"
    )


def _values_in(file: Path) -> dict[str, Any] | None:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def running_settings(home: Home) -> Settings:
    """The settings of this shell. If a stack runs in this state folder, the stack's addresses
    replace the addresses in the settings.

    The stack's addresses may be different from those in the settings: the stack may have taken its
    ports from the environment of another shell, or from the settings file before somebody changed
    the file.
    """
    return at_running_stack(load_settings(), home)


def at_running_stack(settings: Settings, home: Home) -> Settings:
    """`settings` with the addresses of the running stack; unchanged if no stack runs."""
    record = read_stack(home)
    changes = defaultdict[str, dict[str, object]](dict)
    ports: dict[str, int] = {}
    for child in record.children if record is not None else ():
        if child.url is None:
            continue
        url = httpx.URL(child.url)
        host, port = url.host, url.port or 80
        if child.pipeline is not None:
            ports[child.pipeline] = port
            changes["serving"]["host"] = host
        else:
            table = "serving" if child.name == "gateway" else child.name
            changes[table] |= {"host": host, "port": port}
    tables: dict[str, object] = {
        name: getattr(settings, name).model_copy(update=update) for name, update in changes.items()
    }
    tables["pipelines"] = tuple(
        pipeline.model_copy(update={"port": ports.get(pipeline.name, pipeline.port)})
        for pipeline in settings.pipelines
    )
    return settings.model_copy(update=tables)
