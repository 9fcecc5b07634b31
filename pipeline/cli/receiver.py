"""`pipeline receiver`: runs the receiver, and puts a receiver into a Space."""

import io
import json
import sys
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from dotenv import dotenv_values

from jobs.spec import is_git_url
from pipeline import space_deploy
from pipeline.cli.terminal import JsonOption, without_none
from pipeline.cli.webhooks import hub_access
from pipeline.errors import PipelineError
from pipeline.logs import log_to_stderr
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import retrain_rules
from pipeline.settings import load_settings
from pipeline.stack.subscriptions import hub_credentials
from pipeline.tokens import load_tokens, secret_in_shell
from receiver.settings import ReceiverSettings
from receiver.verify import PushSender

app = typer.Typer(
    help="Run the webhook receiver, which starts retraining jobs. Its default port is 7860.",
    invoke_without_command=True,
)


@app.callback()
def receiver(
    context: typer.Context,
    tunnel: Annotated[
        str | None, typer.Option(help="A command that opens a tunnel and prints its URL.")
    ] = None,
    public_url: Annotated[
        str | None, typer.Option(help="The URL at which senders reach the receiver.")
    ] = None,
) -> None:
    if context.invoked_subcommand is not None:
        return
    from receiver.retrain import retrain_handler
    from receiver.webhooks_server import WebhooksServer, add_live_route, measure

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "receiver")
    tokens = load_tokens(home.tokens_file)
    receiver_settings = {
        **settings.receiver.model_dump(exclude_unset=True),
        **without_none(tunnel=tunnel, public_url=public_url),
    }
    with open_job_store(settings, home) as store:
        server = WebhooksServer(
            webhook_secret=tokens.webhook,
            settings=ReceiverSettings.model_validate(receiver_settings),
            hubs=hub_credentials(settings, home, tokens),
            state_dir=home.root,
            secret_in_shell=secret_in_shell(home.tokens_file),
        )
        measure(server)
        add_live_route(server.app, store)
        retrain = retrain_handler(store, retrain_rules(settings, home))
        server.add_webhook("/retrain", knows_repeats=True)(retrain)
        if any(is_git_url(pipeline.dataset) for pipeline in settings.pipelines):
            for sender in get_args(PushSender):
                server.add_webhook(f"/retrain/{sender}", proof=sender, knows_repeats=True)(retrain)
        server.launch(share=server.settings.tunnel is not None)


@app.command()
def deploy(
    space: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The Space.")],
    endpoint: Annotated[
        str, typer.Option(help="A hub that runs Spaces, such as https://huggingface.co.")
    ],
    folder: Annotated[
        Path | None, typer.Argument(help="The folder with your app.py. Default: an example.")
    ] = None,
    secret_file: Annotated[
        str | None, typer.Option(help="A file with a line WEBHOOK_SECRET=VALUE, or - for stdin.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Create a Space that runs a receiver, or update it.

    The Space gets the files of FOLDER, but no hidden files such as .env. If FOLDER has no README.md
    or no requirements.txt, this command makes the missing file. The Space also gets the secret
    WEBHOOK_SECRET. The value of this secret is read from --secret-file. Without it, the value is
    the webhook secret of the stack.

    The hub is that of --endpoint: the stack's own runs no Space. It gets your own token: HF_TOKEN,
    or the token of `hf auth login`.
    """
    if space.count("/") != 1 or not all(space.split("/")):
        raise PipelineError(f"{space!r} is not the name of a Space: write OWNER/NAME")
    tokens_file = Home.find().tokens_file
    if secret_file is None:
        secret = load_tokens(tokens_file).webhook
        shown = secret_in_shell(tokens_file)
    else:
        secret = _secret_in(secret_file)
        shown = '"$WEBHOOK_SECRET"'
    deployed = space_deploy.deploy(space, folder, secret, **hub_access(endpoint))
    if as_json:
        print(json.dumps(asdict(deployed)))
        return
    print(f"{deployed.url} is at {deployed.commit} with these files:")
    for name, count in Counter(file.partition("/")[0] for file in deployed.files).items():
        print(f"  {name}" + (f" ({count} files)" if count > 1 else ""))
    print(f"The secret {space_deploy.SECRET} is set.")
    url = f"{space_deploy.public_address(space)}/webhooks/NAME"
    print(f"Webhooks can post to {url}, where NAME is the name of a function. Create one with:")
    print(
        f"  pipeline webhooks create --endpoint {endpoint} --url {url} "
        f"--watch dataset:OWNER/NAME --domain repo --secret {shown}"
    )


def _secret_in(file: str) -> str:
    """The value of WEBHOOK_SECRET in the file; `-` is standard input. Raises PipelineError."""
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PipelineError(f"--secret-file {file} cannot be read: {error}") from None
    found = dotenv_values(stream=io.StringIO(text), interpolate=False)
    if not (secret := found.get(space_deploy.SECRET)):
        raise PipelineError(f"{file} has no line {space_deploy.SECRET}=VALUE")
    return secret
