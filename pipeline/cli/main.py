"""Joins all subcommands into the `pipeline` command. Each subcommand imports large libraries only
when it runs, so that `pipeline --help` loads neither torch nor a database library."""

import errno
import sys

import typer

from jobs.errors import JobError
from pipeline.cli import (
    data,
    hub,
    jobs,
    receiver,
    releases,
    services,
    webhooks,
)
from pipeline.cli.demo import demo
from pipeline.cli.doctor import doctor
from pipeline.cli.env import env
from pipeline.cli.init import init
from pipeline.cli.project import name_stacks
from pipeline.cli.settings import settings
from pipeline.cli.status import status
from pipeline.cli.up import down, up
from pipeline.errors import PipelineError
from pipeline.paths import Home
from receiver.errors import ReceiverError
from serving.errors import ServingError

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)

app = typer.Typer(
    help="A model that follows its data: push a commit to a dataset, then ask the retrained model.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(up)
app.command()(down)
app.command()(demo)
app.command()(init)
app.command()(settings)
app.command()(status)
app.command()(doctor)
app.command()(jobs.pause)
app.command()(jobs.resume)
app.command()(env)
app.add_typer(webhooks.app, name="webhooks")
app.add_typer(data.app, name="data")
app.add_typer(jobs.app, name="jobs")
app.add_typer(releases.app, name="releases")
app.add_typer(hub.app, name="hub")
app.add_typer(receiver.app, name="receiver")
app.command()(services.serve)
app.command()(services.gateway)
name_stacks(app)


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
