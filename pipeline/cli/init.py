"""`pipeline init`: writes a short `pipeline.toml`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from pipeline.errors import PipelineError

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
    """Write pipeline.toml into the working folder. `pipeline settings` prints the keys that it does
    not have."""
    from pydantic import ValidationError

    from pipeline.settings import PipelineSettings, value_fault_text
    from receiver.project import SETTINGS_FILE

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
