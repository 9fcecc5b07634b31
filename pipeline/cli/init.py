"""`pipeline init`: writes `pipeline.toml`, with a comment on every key."""

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from pipeline.errors import PipelineError


def init(
    name: Annotated[str, typer.Option(help="The pipeline's name: what requests call `model`.")],
    dataset: Annotated[str, typer.Option(help="The dataset it follows, as OWNER/NAME.")],
    base_model: Annotated[
        str, typer.Option(help="preset:tiny, a checkpoint folder, or a hub id.")
    ] = "preset:tiny",
    force: Annotated[bool, typer.Option(help="Overwrite the file.")] = False,
) -> None:
    """Write pipeline.toml into this folder, every key commented with its default."""
    from pydantic import ValidationError

    from pipeline.settings import SETTINGS_FILE, PipelineSettings, in_words, settings_file

    file = Path(SETTINGS_FILE).absolute()
    if file.exists() and not force:
        raise PipelineError(f"{file} exists; edit it, or overwrite it with --force")
    try:
        pipeline = PipelineSettings(name=name, dataset=dataset, base_model=base_model)
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0]).replace("_", "-")
        words = in_words(str(problem["loc"][0]), problem["type"], problem["msg"])
        raise PipelineError(f"--{option} {problem['input']!r}: {words}") from None
    file.write_text(settings_text(pipeline))
    elsewhere = settings_file() != file or Path(os.environ.get("PIPELINE_HOME", file)).parent != (
        file.parent
    )
    leave = "unset PIPELINE_HOME PIPELINE_SETTINGS && " if elsewhere else ""
    print(f"{file} is written. Start the stack with: {leave}pipeline up")


def settings_text(*pipelines: BaseModel) -> str:
    """The text of a settings file with these pipelines, and every other key at its default."""
    from pipeline.settings import Settings

    lines = [
        "# Settings of the stack. A key that is commented out has the value shown; the environment",
        "# overrules this file: PIPELINE_HUB__PORT=9000 is `port = 9000` under [hub].",
    ]
    for table in ("hub", "receiver", "jobs", "serving", "logs"):
        lines += ["", f"[{table}]", *_keys(Settings.model_fields[table].default, set())]
    for pipeline in pipelines:
        lines += ["", "[[pipelines]]", *_keys(pipeline, {"name", "dataset", "base_model"})]
        for table in ("train", "gate"):
            lines += ["", f"[pipelines.{table}]", *_keys(getattr(pipeline, table), set())]
    return "\n".join(lines) + "\n"


def _keys(settings: BaseModel, always: set[str]) -> Iterator[str]:
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, BaseModel):
            continue
        if field.description:
            yield from textwrap.wrap(
                " ".join(field.description.split()), 96, initial_indent="# ", subsequent_indent="# "
            )
        if value is None:
            yield f"# {key} is not set"
            continue
        is_set = key in always or value != field.get_default(call_default_factory=True)
        yield f"{'' if is_set else '# '}{key} = {_toml(value)}"


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(str(value) if isinstance(value, PurePath) else value)
