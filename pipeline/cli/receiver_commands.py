"""`pipeline receiver`: runs the receiver, and puts a receiver into a Space."""

from typing import Annotated

import typer

from pipeline.cli import services, space_commands
from pipeline.cli.services import HostOption, PortOption

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
