"""`pipeline receiver`: runs the receiver, lists and replays dead letters, and puts a receiver into
a Space.

A durable handler is a handler that the receiver calls again after a failure. If a durable handler
fails for a delivery again and again, the receiver no longer calls the handler for this delivery.
The delivery is then called a dead letter.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli import services, space_commands
from pipeline.cli.options import JsonOption, QuietOption
from pipeline.cli.project import project_home
from pipeline.cli.services import HostOption, PortOption
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--file",
        help="The file in which the receiver stores deliveries. Default: `deliveries_path` in the "
        "settings or, if that is not set, `receiver.db` in the state folder.",
    ),
]

app = typer.Typer(
    help="Run the webhook receiver, which starts retraining jobs. Its default port is 7860.",
    invoke_without_command=True,
)


space_commands.add_to(app)


@app.callback()
def receiver(
    context: typer.Context,
    host: HostOption = None,
    port: PortOption = None,
    tunnel: Annotated[
        str | None,
        typer.Option(
            help="Open a tunnel: ssh://user@host[:port], or a command that prints a public URL."
        ),
    ] = None,
    public_url: Annotated[
        str | None,
        typer.Option(help="The URL at which senders reach the receiver, if you use no tunnel."),
    ] = None,
) -> None:
    if context.invoked_subcommand is None:
        services.receiver(host, port, tunnel, public_url)


@app.command()
def dead(file: FileOption = None, as_json: JsonOption = False, quiet: QuietOption = False) -> None:
    """List dead letters. A dead letter is a delivery for which a durable handler has failed again
    and again, so that the receiver no longer calls the handler for this delivery."""
    from receiver.dead_letters import list_dead_letters

    found = list_dead_letters(file or _deliveries_path())
    if as_json:
        print(json.dumps([asdict(letter) for letter in found]))
    elif quiet:
        print("".join(f"{letter.id}\n" for letter in found), end="")
    else:
        rows = [
            (
                letter.id,
                letter.path,
                letter.repository or "",
                str(letter.attempts),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(letter.died_at)),
                letter.failure or "",
            )
            for letter in found
        ]
        headings = ("delivery", "handler", "repository", "calls", "given up", "last failure")
        print_table(headings, rows, empty="No dead letter.")


@app.command()
def replay(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DELIVERY]…", help="The ids of deliveries, from `receiver dead`."),
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Replay every dead letter.")] = False,
    file: FileOption = None,
) -> None:
    """Make the receiver handle dead letters again. If a receiver is running, it begins within
    seconds. If no receiver is running, the next receiver that starts handles the dead letters."""
    from receiver.dead_letters import replay_dead_letters

    if all_ == bool(ids):
        raise PipelineError("name the deliveries to replay, or use --all")
    replayed = replay_dead_letters(file or _deliveries_path(), None if all_ else ids, time.time())
    if replayed:
        print(f"the receiver will handle again: {', '.join(replayed)}")
    else:
        print("there is no dead letter, so there is nothing to handle again")


def _deliveries_path() -> Path:
    from pipeline.services import deliveries_path
    from pipeline.settings import load_settings

    return deliveries_path(load_settings(), project_home())
