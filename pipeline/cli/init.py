"""`pipeline init`: writes `pipeline.toml`. The file lists every key, and explains most keys in a
comment."""

import json
import textwrap
from collections.abc import Collection, Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from pipeline.errors import PipelineError


def init(
    name: Annotated[
        str,
        typer.Option(
            help="The pipeline's name. A request to the completion server of the pipeline may give "
            "this name as its `model`."
        ),
    ],
    dataset: Annotated[
        str, typer.Option(help="The dataset to follow, as OWNER/NAME or a git URL.")
    ],
    dataset_endpoint: Annotated[
        str,
        typer.Option(
            help="The hub that has OWNER/NAME: `hub` for the hub of this stack, or the URL of "
            "another hub."
        ),
    ] = "hub",
    base_model: Annotated[
        str,
        typer.Option(
            help="The model that training starts from: preset:tiny, a checkpoint folder, or the id "
            "of a model on a hub (OWNER/NAME)."
        ),
    ] = "preset:tiny",
    force: Annotated[bool, typer.Option(help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write pipeline.toml into the working folder. The file lists every key of the settings. A key
    that has its default value is commented out, except `base_model`."""
    from pydantic import ValidationError

    from pipeline.paths import SETTINGS_FILE
    from pipeline.settings import PipelineSettings, value_fault_text

    file = Path(SETTINGS_FILE).absolute()
    if file.exists() and not force:
        raise PipelineError(f"{file} already exists; edit it, or overwrite it with --force")
    try:
        pipeline = PipelineSettings(
            name=name, dataset=dataset, dataset_endpoint=dataset_endpoint, base_model=base_model
        )
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0]).replace("_", "-")
        words = value_fault_text(str(problem["loc"][0]), problem["type"], problem["msg"])
        raise PipelineError(f"--{option} {problem['input']!r}: {words}") from None
    file.write_text(settings_text(pipeline))
    print(f"{file} is written. Start the stack with: pipeline up")


def settings_text(*pipelines: BaseModel) -> str:
    """The text of a settings file with these pipelines. All other settings have their defaults."""
    from pipeline.settings import Settings

    lines = [
        "# Settings of the stack. If a key is commented out, the value shown is its default.",
        "# Environment variables override this file: PIPELINE_HUB__PORT=9000 means `port = 9000`",
        "# under [hub].",
    ]
    for name, field in Settings.model_fields.items():
        if isinstance(field.default, BaseModel):
            lines += _table(f"[{name}]", field.default)
    for pipeline in pipelines:
        lines += _table("[[pipelines]]", pipeline, always={"name", "dataset", "base_model"})
    return "\n".join(lines) + "\n"


def _table(
    heading: str, settings: BaseModel, always: Collection[str] = frozenset()
) -> Iterator[str]:
    """Yields the lines of one table of the file, with the description of each key as a comment.
    Then yields the lines of the tables inside this table.

    A key that has its default value is commented out, unless the key is in `always`.
    """
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
        is_set = value is not None and (key in always or value != default)
        text = "is not set" if value is None else f"= {_toml(value)}"
        yield f"{'' if is_set else '# '}{key} {text}"
    for inner_heading, table in inner.items():
        yield from _table(inner_heading, table)


def _toml(value: Any) -> str:
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return json.dumps(str(value) if isinstance(value, PurePath) else value)
