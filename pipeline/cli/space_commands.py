"""`pipeline receiver deploy` and `pipeline receiver app`: put a receiver into a Space, and run the
app of a Space on this machine."""

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from pipeline.cli.options import JsonOption
from pipeline.cli.webhook_commands import hub_access, secrets_in
from pipeline.errors import PipelineError
from pipeline.paths import Home

SpaceEndpointOption = Annotated[
    str | None,
    typer.Option(
        help="The URL of another hub, such as https://huggingface.co. The other hub gets your own "
        "token: HF_TOKEN, or the token of `hf auth login`. Default: the stack's own hub."
    ),
]
SecretFileOption = Annotated[
    str | None,
    typer.Option(
        help="A file with a line WEBHOOK_SECRET=VALUE. The file may also set other variables, one "
        "on each line. With -, the lines are read from stdin."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command()(deploy)
    app.command("app")(run)


def deploy(
    space: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The Space.")],
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="The folder with your app.py. Default: an app.py that shows how to begin."
        ),
    ] = None,
    secret_file: SecretFileOption = None,
    endpoint: SpaceEndpointOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would be sent.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Create a Space that runs a receiver, or update it.

    The Space gets the files of FOLDER, but no hidden files such as .env. If FOLDER has no README.md
    or no requirements.txt, this command makes the missing file. The Space also gets the secret
    WEBHOOK_SECRET. The value of this secret is read from --secret-file. Without --secret-file, the
    value is the webhook secret of the stack.
    """
    import json

    from pipeline import space_deploy
    from pipeline.tokens import load_tokens, secret_in_shell

    _check_name(space)
    tokens_file = Home.find().tokens_file
    if secret_file is None:
        secret = load_tokens(tokens_file).webhook
        shown = secret_in_shell(tokens_file)
    else:
        found = secrets_in(secret_file, "--secret-file")
        if not found.get(space_deploy.SECRET):
            raise PipelineError(f"{secret_file} has no line {space_deploy.SECRET}=VALUE")
        secret = found[space_deploy.SECRET]
        shown = '"$WEBHOOK_SECRET"'
    access = _access(endpoint)
    deployed = space_deploy.deploy(
        space, folder, secret, endpoint=access[0], token=access[1], dry_run=dry_run
    )
    if as_json:
        print(json.dumps(asdict(deployed)))
        return
    verb = "would be" if dry_run else "is"
    print(f"{deployed.url} {verb} at {deployed.commit or 'a new commit'} with these files:")
    folders = [file for file in deployed.files if "/" in file]
    for file in (each for each in deployed.files if "/" not in each):
        print(f"  {file}")
    if folders:
        top = sorted({each.partition("/")[0] for each in folders})
        print(f"  and {len(folders)} files in {', '.join(top)}")
    print(f"The secret {space_deploy.SECRET} {verb} set.")
    if endpoint is None:
        print("The stack's own hub does not run the apps of Spaces.")
        print(f"To run the app on this machine: pipeline receiver app {space}")
        return
    for route in deployed.routes:
        url = f"{space_deploy.public_address(space)}{route}"
        print(f"Webhooks can post to {url}. Create a webhook with:")
        print(
            f"  pipeline webhooks create --endpoint {endpoint} --url {url} "
            f"--watch dataset:OWNER/NAME --domain repo --secret {shown}"
        )


def run(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FOLDER|OWNER/NAME", help="A folder with app.py, or a Space on a hub."
        ),
    ],
    secret_file: SecretFileOption = None,
    endpoint: SpaceEndpointOption = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="The port to listen on.")] = 7860,
) -> None:
    """Run the app of a Space on this machine, with the environment variables of a Space.

    The app listens on 127.0.0.1 and opens no tunnel. For a Space on the stack's own hub, the app
    gets the secrets and variables of the Space. For a Space on another hub (--endpoint), give the
    secrets in a --secret-file, because no hub sends a secret to a client. For a FOLDER without
    --secret-file, the app gets WEBHOOK_SECRET from this shell.
    """
    from pipeline import space_run

    with _files(target, endpoint) as (space, folder):
        file = space_run.app_file(folder)
        stored = {} if Path(target).is_dir() or endpoint is not None else _stored_variables(target)
        given = {} if secret_file is None else secrets_in(secret_file, "--secret-file")
        if Path(target).is_dir() and secret_file is None and "WEBHOOK_SECRET" in os.environ:
            given["WEBHOOK_SECRET"] = os.environ["WEBHOOK_SECRET"]
        variables = space_run.environment(space, port, {**stored, **given}, os.environ)
        if endpoint is not None or not Path(target).is_dir():
            variables.setdefault("HF_ENDPOINT", _access(endpoint)[0])
        code = space_run.run_app(
            file,
            variables,
            port,
            lambda: print(f"{space} runs at http://{space_run.HOST}:{port}/", flush=True),
        )
    sys.exit(code)


@contextmanager
def _files(target: str, endpoint: str | None) -> Iterator[tuple[str, Path]]:
    """Yields the name of the Space, and a folder with its files. If `target` is a folder of the
    user, the name of the Space is `local/<name of the folder>`."""
    if Path(target).is_dir():
        yield f"local/{Path(target).resolve().name}", Path(target)
        return
    _check_name(target)
    from pipeline.space_deploy import download

    url, token = _access(endpoint)
    with tempfile.TemporaryDirectory(prefix="space-") as temporary:
        yield target, download(target, Path(temporary), endpoint=url, token=token)


def _stored_variables(space: str) -> Mapping[str, str]:
    """The secrets and variables of a Space on the stack's own hub. This function reads them from
    the hub's database, because the hub never sends a secret to a client."""
    from pipeline.hub.errors import HubError
    from pipeline.hub.repositories.names import repository_name
    from pipeline.hub.spaces import environment_of
    from pipeline.hub.state_folder import database_path
    from pipeline.hub.webhooks.store import SecretCipher
    from pipeline.tokens import load_tokens

    home = Home.find()
    cipher = SecretCipher(load_tokens(home.tokens_file).key.encode())
    try:
        name = repository_name("space", *space.split("/"))
        return environment_of(database_path(home.hub_dir), name, cipher)
    except HubError as error:
        raise PipelineError(str(error)) from None


def _access(endpoint: str | None) -> tuple[str, str | None]:
    """The URL of the hub, and the token for this hub. If `endpoint` names another hub, the token is
    the user's own token, or None if the user has no token."""
    from pipeline.retrain.own_token import own_token
    from pipeline.tokens import load_tokens

    if endpoint is None:
        access = hub_access(None)
        return access["endpoint"], access["token"]
    stack_token = load_tokens(Home.find().tokens_file).hub
    return endpoint.rstrip("/"), own_token(os.environ, stack_token)


def _check_name(space: str) -> None:
    if space.count("/") != 1 or not all(space.split("/")):
        raise PipelineError(f"{space!r} is not the name of a Space: write OWNER/NAME")
