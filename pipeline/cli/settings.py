"""`pipeline settings`: prints every key of the settings."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

if TYPE_CHECKING:
    from pipeline.settings import Settings


def settings() -> None:
    """Print every key of the settings, as a settings file with comments. A key that has its default
    value is commented out."""
    from pipeline.settings import load_settings

    print(settings_text(load_settings()), end="")


def settings_text(settings: "Settings") -> str:
    """If the settings have no pipeline, the text shows one with defaults."""
    from pipeline.settings import PipelineSettings

    example = PipelineSettings(name="NAME", dataset="OWNER/NAME")
    lines = ["# If a key is commented out, the value shown is its default."]
    for name, field in type(settings).model_fields.items():
        if isinstance(field.default, BaseModel):
            lines += _table(f"[{name}]", getattr(settings, name))
    for pipeline in settings.pipelines or (example,):
        lines += _table("[[pipelines]]", pipeline)
    return "\n".join(lines) + "\n"


def _table(heading: str, settings: BaseModel) -> Iterator[str]:
    """The lines of one table, with the description of each key as a comment. Then the lines of the
    tables inside this table."""
    from pipeline.settings import SECRET_KEYS

    yield from ("", heading)
    inner = {}
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, BaseModel):
            inner[f"[{heading.strip('[]')}.{key}]"] = value
            continue
        if field.description:
            yield from textwrap.wrap(
                " ".join(field.description.split()), 96, initial_indent="# ", subsequent_indent="# "
            )
        default = field.get_default(call_default_factory=True)
        if value is None:
            yield f"# {key} is not set"
        elif key in SECRET_KEYS:
            yield f"# {key} is set, but not shown"
        else:
            yield f"{'# ' if value == default else ''}{key} = {_toml(value)}"
    for inner_heading, table in inner.items():
        yield from _table(inner_heading, table)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(str(value) if isinstance(value, PurePath) else value)
