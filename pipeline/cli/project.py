"""Which project a command acts on."""

import os
import sys
from typing import Any

import typer
from typer.core import TyperCommand

from pipeline.errors import PipelineError
from pipeline.paths import Home, settings_file

ONLY_READ = frozenset(
    {
        *("check", "deliveries", "doctor", "env", "info", "inspect", "logs", "ls", "settings"),
        *("show", "status", "verify", "wait"),
        *("gateway", "runner", "serve"),
        *("demo", "init"),
    }
)
"""The commands that change nothing; the services of a stack; the commands that begin a project."""


def project_home() -> Home:
    """The state folder. Unlike `Home.find`, this function raises PipelineError if the shell is in
    no project. This is the case if there is neither a settings file nor a state folder, and neither
    `PIPELINE_HOME` nor `PIPELINE_SETTINGS` is set. Without the error, a command would report that
    nothing is up, although a stack may be up in another folder."""
    home = Home.find()
    if is_project(home):
        return home
    from pipeline.settings import no_settings_file

    raise no_settings_file()


def is_project(home: Home) -> bool:
    is_named = "PIPELINE_HOME" in os.environ or "PIPELINE_SETTINGS" in os.environ
    return is_named or home.root.exists() or settings_file().exists()


class ChangesStack(TyperCommand):
    """Before the command runs, it names the stack on which it acts. So a person in the wrong folder
    sees it."""

    def invoke(self, context: Any) -> Any:
        home, given = Home.find(), context.params
        if is_project(home) and given.get("endpoint") is None and not given.get("as_json"):
            pipelines = ", ".join(_pipelines(given.get("pipeline"))) or "none"
            print(f"stack {home.root}, pipeline {pipelines}", file=sys.stderr)
        return super().invoke(context)


def name_stacks(app: typer.Typer) -> None:
    """Make every command of `app` that is not in `ONLY_READ` a `ChangesStack`."""
    for command in app.registered_commands:
        assert command.callback is not None
        if (command.name or command.callback.__name__) not in ONLY_READ:
            command.cls = ChangesStack
    for group in app.registered_groups:
        assert group.typer_instance is not None
        name_stacks(group.typer_instance)


def _pipelines(given: str | None) -> list[str]:
    from pipeline.settings import load_settings

    try:
        return [given] if given else [each.name for each in load_settings().pipelines]
    except PipelineError:
        return []  # the command itself reports this error
