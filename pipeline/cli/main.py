"""Joins all subcommands into the `pipeline` command. A module is imported only when one of its
commands runs, so that `pipeline --help` loads neither torch nor a database library."""

import errno
import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from jobs.errors import JobError
from pipeline.errors import PipelineError
from pipeline.paths import Home
from receiver.errors import ReceiverError
from serving.errors import ServingError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
_COMMANDS = {
    "up": ("up", "Start the stack: hub, receiver, job runner and completion servers."),
    "down": ("up", "Stop the stack of this state folder."),
    "open": ("open", "Open the console, the pages of the stack, in a browser."),
    "demo": ("demo", "Push two commits to a dataset, and show how the model's answers change."),
    "init": ("settings", "Write pipeline.toml into the working folder."),
    "settings": ("settings", "Print every key of the settings."),
    "status": ("status", "Show the services, the served release, and the jobs."),
    "doctor": ("status", "Check the stack and its state folder. Say what is wrong."),
    "pause": ("up", "Start no job for pushes until `pipeline resume`."),
    "resume": ("up", "End a pause."),
    "env": ("env", "Print shell commands that make git and the Hugging Face clients use the hub."),
    "webhooks": ("webhooks", "Manage the webhooks of a hub."),
    "data": ("data", "Check the rows of a dataset before a push."),
    "jobs": ("jobs", "Run, list, follow, cancel and wait for jobs."),
    "releases": ("releases", "Manage releases, and choose which one is served."),
    "hub": ("hub", "Run the hub, manage its tokens, and remove commits."),
    "receiver": ("receiver", "Run the webhook receiver, or put one into a Space."),
    "serve": ("serve", "Run the completion server, on port 8000 by default."),
    "runner": ("jobs", "Run jobs, also on another machine than the rest of the stack."),
    "gateway": ("serve", "Run the gateway: one address for the servers of several pipelines."),
}
"""Command → the module of this package that has it, and what `pipeline --help` says of it."""


class _ImportsLate(TyperGroup):
    def resolve_command(self, context: Any, args: list[str]) -> Any:
        name, _, rest = super().resolve_command(context, args)
        assert name is not None
        module = import_module(f"pipeline.cli.{_COMMANDS[name][0]}")
        group = typer.main.get_group(module.app)
        return name, group.commands.get(name, group), rest


app = typer.Typer(
    cls=_ImportsLate,
    help="A model that follows its data: push a commit to a dataset, then ask the retrained model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _name, (_, _help) in _COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)


def main() -> None:
    """Run the `pipeline` command. For an error that the user can correct, such as wrong settings or
    a full disk, print only a message. For any other error, Python prints a traceback."""
    try:
        app()
    except (PipelineError, JobError, ReceiverError, ServingError) as error:
        sys.exit(f"pipeline: {error}")
    except OSError as error:
        if error.errno not in _DISK_ERRORS:
            raise
        sys.exit(
            f"pipeline: {error.filename or 'a file'} cannot be opened or written: "
            f"{error.strerror}; make {Home.find().root} writable, or set PIPELINE_HOME to another "
            "state folder"
        )
