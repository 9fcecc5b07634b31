"""`pipeline init`: writes a short `pipeline.toml`. `pipeline settings`: prints every key."""

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any

import typer
from pydantic import BaseModel, ValidationError

from pipeline.errors import PipelineError
from pipeline.settings import (
    SECRET_KEYS,
    PipelineSettings,
    Settings,
    load_settings,
    value_fault_text,
)
from receiver.settings import SETTINGS_FILE

app = typer.Typer()

TEXT = """\
# The settings of this stack. `pipeline settings` prints every key, its value and what it means.
# After a change: pipeline down && pipeline up --detach
# An environment variable overrides a key: PIPELINE_HUB__PORT=9000 means `port = 9000` under [hub].

[[pipelines]]
# A request to the server may give this name as its `model`.
name = {name}
# Each push to this dataset trains the model on the new rows.
dataset = {dataset}{endpoint}
# Training starts from these weights: preset:tiny (small, and untrained), a checkpoint folder, or
# the id of a model on a hub, such as "HuggingFaceTB/SmolLM2-135M-Instruct".
base_model = {base_model}
"""


@app.command()
def init(
    name: Annotated[
        str,
        typer.Option(help="The pipeline's name."),
    ],
    dataset: Annotated[str, typer.Option(help="The dataset to follow: OWNER/NAME or a git URL.")],
    dataset_endpoint: Annotated[
        str, typer.Option(help="`hub` for the hub of this stack, or the URL of another.")
    ] = "hub",
    base_model: Annotated[
        str, typer.Option(help="preset:tiny, a checkpoint folder, or OWNER/NAME.")
    ] = "preset:tiny",
    force: Annotated[bool, typer.Option(help="Overwrite the file if it exists.")] = False,
) -> None:
    """Write pipeline.toml into the working folder. `pipeline settings` prints the keys that it does
    not have."""
    file = Path(SETTINGS_FILE).absolute()
    if file.exists() and not force:
        raise PipelineError(f"{file} already exists; edit it, or overwrite it with --force")
    try:
        PipelineSettings(
            name=name, dataset=dataset, dataset_endpoint=dataset_endpoint, base_model=base_model
        )
    except ValidationError as error:
        problem = error.errors()[0]
        option = str(problem["loc"][0]).replace("_", "-")
        words = value_fault_text(str(problem["loc"][0]), problem["type"], problem["msg"])
        raise PipelineError(f"--{option} {problem['input']!r}: {words}") from None
    file.write_text(
        TEXT.format(
            name=json.dumps(name),
            dataset=json.dumps(dataset),
            endpoint=""
            if dataset_endpoint == "hub"
            else f"\ndataset_endpoint = {json.dumps(dataset_endpoint)}",
            base_model=json.dumps(base_model),
        )
    )
    print(f"{file} is written. Start the stack with: pipeline up")


@app.command()
def settings() -> None:
    """Print every key of the settings, as a settings file with comments. A key that has its default
    value is commented out."""
    print(settings_text(load_settings()), end="")


def settings_text(settings: Settings) -> str:
    """If the settings have no pipeline, the text shows one with defaults."""
    example = PipelineSettings(name="NAME", dataset="OWNER/NAME")
    lines = ["# If a key is commented out, the value shown is its default."]
    for name, field in type(settings).model_fields.items():
        if isinstance(field.default, BaseModel):
            lines += _table(f"[{name}]", getattr(settings, name))
    for name, launcher in settings.launchers.items():
        lines += _table(f"[launchers.{json.dumps(name)}]", launcher)
    for pipeline in settings.pipelines or (example,):
        lines += _table("[[pipelines]]", pipeline)
    return "\n".join(lines) + "\n"


def _table(heading: str, settings: BaseModel) -> Iterator[str]:
    """The lines of one table, with the description of each key as a comment. Then the lines of the
    tables inside this table."""
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
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    return json.dumps(str(value) if isinstance(value, PurePath) else value)
