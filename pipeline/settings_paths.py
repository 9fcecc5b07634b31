"""Makes the paths in the settings absolute. A relative path starts at the folder of the settings
file, wherever a command is run. A `~` is the home folder."""

import shlex
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

Table = TypeVar("Table", bound=BaseModel)


def with_absolute_paths(table: Table, folder: Path) -> Table:
    """The table of the settings, and the tables in it, with absolute paths. A relative path starts
    at `folder`. Raises ValueError if the home folder in a path is not known."""
    changed: dict[str, Any] = {}
    for key in table.model_fields_set:
        try:
            changed[key] = _with_absolute_path(key, getattr(table, key), folder)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
    return table.model_copy(update=changed)


def _with_absolute_path(key: str, value: Any, folder: Path) -> Any:
    match key, value:
        case _, BaseModel():
            return with_absolute_paths(value, folder)
        case _, Path():
            return absolute_path(value, folder)
        # If a program has no `/`, the system looks for it on PATH.
        case "command" | "on_outcome", (program, *arguments) if "/" in program:
            return (str(absolute_path(Path(program), folder)), *arguments)
        case "tunnel", str() if not value.startswith("ssh://"):
            program, *arguments = shlex.split(value) or [""]
            if "/" in program:
                return shlex.join([str(absolute_path(Path(program), folder)), *arguments])
        # Only the disk shows whether `owner/name` is a relative path or an id on a hub. So
        # `PipelineSettings.base_folder` makes relative paths absolute, when they are needed.
        case "base_model", str() if value.startswith("~"):
            return str(absolute_path(Path(value), folder))
        case "database_url", str() if "://" not in value:
            return str(absolute_path(Path(value), folder))
    return value


def absolute_path(path: Path, folder: Path) -> Path:
    try:
        return folder / path.expanduser()
    except RuntimeError:
        raise ValueError(f"the home folder in {path} is not known; write the whole path") from None
