"""`pipeline open`: opens the console, the pages of the hub's address, in a browser."""

import webbrowser
from contextlib import suppress
from getpass import getuser
from typing import Annotated

import typer

from pipeline.cli.terminal import project_home
from pipeline.errors import PipelineError
from pipeline.hub.service import grant
from pipeline.stack.record import running_settings
from pipeline.stack.services import health
from pipeline.tokens import load_tokens

app = typer.Typer()


def _account() -> str:
    """The name of the user's account on this machine: the author of commits in the console. Empty
    if it has none, as in some containers."""
    with suppress(KeyError, OSError):
        return getuser()
    return ""


@app.command(name="open")
def open_(
    print_only: Annotated[
        bool, typer.Option("--print", help="Only print the link: open it on another machine.")
    ] = False,
) -> None:
    """Open the console in a browser: pages that show what the stack does, and drive it. The link
    signs you in with the hub's own token. It works once, within a minute.
    """
    home = project_home()
    url = running_settings(home).hub_url
    if health(url) is None:
        raise PipelineError(f"no hub answers at {url}; start the stack: pipeline up --detach")
    tokens = load_tokens(home.tokens_file)
    link = f"{url}/login?once={grant(tokens.key.encode(), 'link', tokens.hub, _account())}"
    print(link)
    if not print_only:
        webbrowser.open(link)
