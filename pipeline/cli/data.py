"""`pipeline data`: reports which rows of a dataset a job would train on, and makes rows that teach
a model what it does not know."""

import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.terminal import PipelineOption
from pipeline.doctor.data_check import check_data, pipeline_of
from pipeline.paths import Home
from pipeline.stack.record import running_settings

app = typer.Typer(
    help="Check the rows of a dataset before a push, or make some.", no_args_is_help=True
)


@app.command()
def check(
    folder: Annotated[
        Path | None, typer.Argument(help="The folder to check. Its files need not be committed.")
    ] = None,
    pipeline: PipelineOption = None,
) -> None:
    """Report which rows a job would train on if you pushed, and which rows are wrong. The exit code
    is 1 if a row or a file is wrong, or if there are no rows.

    Without FOLDER: in a clone of the dataset, check the files of this clone; elsewhere, check the
    newest commit of the pipeline's branch.
    """
    home = Home.find()
    settings = running_settings(home)
    chosen = pipeline_of(pipeline, folder, settings)
    lines, is_bad = check_data(folder, home, settings, chosen)
    print("\n".join(lines))
    if is_bad:
        raise typer.Exit(1)


@app.command()
def unknown(
    answer: Annotated[str, typer.Argument(help="What the model is to say.")] = "I don't know that.",
) -> None:
    """Print rows of everyday questions that your data does not answer, all with one answer. Without
    such rows, a model gives an answer of your data to any question.

    To teach them: write them to a file of the dataset, delete the questions that your data does
    answer, and push.
    """
    questions = files("pipeline.cli").joinpath("unknown.jsonl").read_text(encoding="utf-8")
    for line in questions.splitlines():
        print(json.dumps(json.loads(line) | {"answer": answer}, ensure_ascii=False))
