"""Makes the paths in the settings absolute. A relative path starts at the folder of the settings
file, wherever a command is run. A `~` is the home folder."""

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

Table = TypeVar("Table", bound=BaseModel)


def with_absolute_paths(table: Table, folder: Path) -> Table:
    """The table of the settings, and the tables in it, with absolute paths. A relative path starts
    at `folder`. Raises ValueError if the home folder in a path is not known."""
    changed: dict[str, Any] = {}
    for key in table.model_fields_set:
        value = getattr(table, key)
        try:
            if isinstance(value, BaseModel):
                changed[key] = with_absolute_paths(value, folder)
            elif isinstance(value, Path):
                changed[key] = absolute_path(value, folder)
            elif value is not None and key in _WITH_A_PATH:
                changed[key] = _WITH_A_PATH[key](value, folder)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return table.model_copy(update=changed)


def absolute_path(path: Path, folder: Path) -> Path:
    try:
        return folder / path.expanduser()
    except RuntimeError:
        raise ValueError(f"the home folder in {path} is not known; write the whole path") from None


def _command(command: tuple[str, ...], folder: Path) -> tuple[str, ...]:
    """If the program has no `/`, it does not change: the system looks for the program on PATH."""
    if not command or "/" not in command[0]:
        return command
    return (str(absolute_path(Path(command[0]), folder)), *command[1:])


def _on_outcome(url_or_command: str | tuple[str, ...], folder: Path) -> str | tuple[str, ...]:
    return url_or_command if isinstance(url_or_command, str) else _command(url_or_command, folder)


def _tunnel(tunnel: str, folder: Path) -> str:
    if tunnel.startswith("ssh://"):
        return tunnel
    command = tuple(shlex.split(tunnel))
    absolute = _command(command, folder)
    return tunnel if absolute == command else shlex.join(absolute)


def _base_model(base_model: str, folder: Path) -> str:
    """Only the disk shows whether `owner/name` is a relative path or an id on a hub. So
    `PipelineSettings.base_folder` makes relative paths absolute, when they are needed."""
    return str(absolute_path(Path(base_model), folder)) if base_model[:1] == "~" else base_model


def _database(url_or_path: str, folder: Path) -> str:
    """A path of a SQLite file becomes absolute; a URL does not change."""
    return url_or_path if "://" in url_or_path else str(absolute_path(Path(url_or_path), folder))


_WITH_A_PATH: Mapping[str, Callable[[Any, Path], Any]] = {
    "base_model": _base_model,
    "command": _command,
    "on_outcome": _on_outcome,
    "tunnel": _tunnel,
    "database_url": _database,
}
"""Keys whose value is not a `Path` but may contain one → the function that makes this path
absolute."""
