"""`pipeline pause` and `pipeline resume`: hold back the jobs of pushes, and start them again."""

from typing import Annotated

import typer

from pipeline.cli.job_access import open_store
from pipeline.cli.project import ChangesStack, project_home
from pipeline.stack.record import running_settings

app = typer.Typer()

NameArgument = Annotated[
    str | None, typer.Argument(help="The pipeline, if several are configured.")
]


@app.command(cls=ChangesStack)
def pause(name: NameArgument = None) -> None:
    """Start no job for pushes until `pipeline resume`. Pushes still arrive, and wait as one job. A
    job that runs goes on, and `pipeline jobs run` works as usual."""
    pipeline = _pipeline_name(name)
    with open_store(project_home()) as store:
        is_new = store.pause(pipeline)
    state = "is paused" if is_new else "was paused already"
    print(f"{pipeline} {state}; to go on: pipeline resume {pipeline}")


@app.command(cls=ChangesStack)
def resume(name: NameArgument = None) -> None:
    """End a pause. If a push has arrived meanwhile, its job starts, and trains on the newest
    commit."""
    pipeline = _pipeline_name(name)
    with open_store(project_home()) as store:
        was_paused = store.resume(pipeline)
    print(f"{pipeline} {'goes on' if was_paused else 'was not paused'}")


def _pipeline_name(name: str | None) -> str:
    return running_settings(project_home()).pipeline(name).name
