"""`pipeline hub tokens`: creates, lists and revokes tokens for other people and programs."""

import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.hub_calls import call_hub
from pipeline.cli.project import project_home
from pipeline.cli.tables import print_table

if TYPE_CHECKING:
    from pipeline.hub.database import Database
    from pipeline.hub.repositories.store import Repositories

app = typer.Typer(
    help="Manage the hub's tokens for other people and programs. Some tokens allow only reading, "
    "and others allow reading and writing. A token is valid for all repositories, or for some.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The name of the token.")]


@app.command()
def create(
    name: NameArgument,
    role: Annotated[
        str, typer.Option(help="What the token allows: read, or write (which includes read).")
    ] = "read",
    repository: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TYPE:OWNER/NAME",
            help="Limit the token to this repository, such as dataset:local/facts. May be "
            "repeated. Default: all repositories.",
        ),
    ] = None,
) -> None:
    """Create a token and print it. The hub stores only the token's hash, so the token cannot be
    shown again.

    You can run this command while the hub is up, and also while the hub is down.
    """
    from pipeline.hub.tokens.store import check_name, create_token

    check_name(name)
    reaches = repository or []
    query = {"role": role} | ({"repositories": ",".join(reaches)} if reaches else {})
    made = _on_hub(
        lambda database, repositories: create_token(database, repositories, name, role, reaches),
        ("POST", f"tokens/{name}", query),
    )
    print(made["token"])
    print("Store the token now: it cannot be shown again.", file=sys.stderr)


@app.command(name="ls")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the tokens: their names, what they may do, and when they were last used."""
    from pipeline.hub.tokens.store import list_tokens

    found = _on_hub(list_tokens, ("GET", "tokens", {}))
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
    print_table(headings, rows, empty="No token yet; create one: pipeline hub tokens create NAME")


@app.command()
def revoke(name: NameArgument) -> None:
    """Revoke a token. The hub refuses every later request that has this token."""
    from pipeline.hub.tokens.store import check_name, revoke_token

    check_name(name)
    _on_hub(lambda database, _: revoke_token(database, name), ("DELETE", f"tokens/{name}", {}))
    print(f"revoked {name}")


def _on_hub(
    act: "Callable[[Database, Repositories], Any]", call: tuple[str, str, dict[str, str]]
) -> Any:
    """If no hub runs, calls `act` in this process, and returns its result. If a hub runs, sends the
    request `call` (method, path and query) to this hub, and returns the JSON of the answer."""
    from pipeline.hub.errors import HubInUse
    from pipeline.hub.state_folder import stopped_hub

    try:
        with stopped_hub(project_home().hub_dir) as (database, repositories):
            return act(database, repositories)
    except HubInUse:
        method, path, query = call
        return call_hub(method, path, None, query)
