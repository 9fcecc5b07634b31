"""`pipeline hub tokens`: tokens that others use, to read or to write."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.hub_calls import call_hub
from pipeline.cli.tables import print_table
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.hub.database import Database
    from pipeline.hub.repositories import Repositories

app = typer.Typer(
    help="Tokens for others: to read or to write, for all repositories or some.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]


@app.command()
def create(
    name: NameArgument,
    role: Annotated[str, typer.Option(help="read or write.")] = "read",
    repository: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:OWNER/NAME",
            help="The only repository that the token reaches, such as dataset:local/facts; may be "
            "repeated. Without it the token reaches all.",
        ),
    ] = None,
) -> None:
    """Create a token and print it. It is shown only now: the hub stores its hash.

    Works whether the hub runs or not.
    """
    from pipeline.hub import token_store, tokens

    token_store.check_name(name)
    reaches = repository or []
    made = _on_hub(
        lambda database, repositories: tokens.create(database, repositories, name, role, reaches),
        ("POST", f"tokens/{name}", {"role": role, "repositories": ",".join(reaches)}),
    )
    print(made["token"])
    print("Keep it: it cannot be shown again.", file=sys.stderr)


@app.command(name="ls")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tokens, with the time of their last use. No token itself is shown."""
    from pipeline.hub import tokens

    found = _on_hub(tokens.listed, ("GET", "tokens", {}))
    if as_json:
        print(json.dumps(found, indent=2))
        return
    rows = [
        (
            each["name"],
            each["role"],
            "all" if each["repositories"] is None else ", ".join(each["repositories"]),
            each["createdAt"][:16],
            (each["lastUsedAt"] or "never")[:16],
        )
        for each in found
    ]
    headings = ("NAME", "ROLE", "REPOSITORIES", "CREATED", "LAST USED")
    print_table(headings, rows, empty="no tokens: pipeline hub tokens create NAME")


@app.command()
def revoke(name: NameArgument) -> None:
    """Revoke a token: the next request with it is refused."""
    from pipeline.hub import token_store, tokens

    token_store.check_name(name)
    _on_hub(lambda database, _: tokens.revoke(database, name), ("DELETE", f"tokens/{name}", {}))
    print(f"revoked {name}")


def _on_hub(
    act: "Callable[[Database, Repositories], Any]", call: tuple[str, str, dict[str, str]]
) -> Any:
    """What `act` answers while no hub runs, or else what the running hub answers to `call`."""
    from pipeline.hub.errors import HubInUse
    from pipeline.hub.state_folder import stopped_hub

    try:
        with stopped_hub(Home.find().hub_dir) as (database, repositories):
            return act(database, repositories)
    except HubInUse:
        method, path, query = call
        return call_hub(method, path, None, query)
