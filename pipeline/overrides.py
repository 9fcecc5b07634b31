"""Changes settings of a pipeline for one run. The options `--set train.max_tokens=500000` and
`--mode full` of `pipeline jobs run` use this module."""

import tomllib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.errors import PipelineError
from pipeline.settings import PipelineSettings, fault_text


def override(pipeline: PipelineSettings, assignments: Sequence[str]) -> PipelineSettings:
    """The pipeline's settings, changed by these assignments.

    An assignment `TABLE.KEY=VALUE` sets one key in one table of the pipeline's settings. The value
    is written as in TOML, except that a text needs no quotes. Raises PipelineError with a message
    that names the wrong key.
    """
    values = pipeline.model_dump(exclude_unset=True)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        table, dot, key = path.strip().partition(".")
        if not equals or not dot or not key:
            raise PipelineError(
                f"--set {assignment} is not TABLE.KEY=VALUE, as in --set train.max_tokens=500000"
            )
        if table not in _tables():
            raise PipelineError(
                f"--set {assignment}: unknown table {table!r}; known: {', '.join(_tables())}"
            )
        values.setdefault(table, {})[key] = _value(text.strip())
    try:
        return PipelineSettings.model_validate(values)
    except ValidationError as error:
        faults = (
            fault_text(("pipelines", *fault["loc"]), fault["type"], fault["msg"], fault["input"])
            for fault in error.errors()
        )
        raise PipelineError(f"--set: {'; '.join(faults)}") from None


def _tables() -> list[str]:
    fields = PipelineSettings.model_fields.items()
    return [name for name, field in fields if isinstance(field.default, BaseModel)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
