"""The parts of the stack as commands of their own: hub, receiver, server."""

from typing import Annotated

import typer

from pipeline.errors import PipelineError
from pipeline.paths import Home

HostOption = Annotated[str | None, typer.Option(help="In place of the settings'.")]
PortOption = Annotated[int | None, typer.Option(help="In place of the settings'.")]


def hub(host: HostOption = None, port: PortOption = None) -> None:
    """Serve the embedded hub: git repositories and webhooks, port 8070."""
    from pipeline.hub.app import create_app
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens

    home, settings = Home.find(), load_settings().hub
    tokens = load_tokens(home.tokens_file)
    app = create_app(settings, home.hub_dir, token=tokens.hub, secret_key=tokens.key.encode())
    _listen(app, host or settings.host, port or settings.port)


def receiver(host: HostOption = None, port: PortOption = None) -> None:
    """Serve the webhook receiver with the retrain handler, port 7860."""
    from pipeline.job_store import open_job_store
    from pipeline.rules import retrain_rules
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens
    from receiver.retrain import retrain_handler
    from receiver.server import WebhooksServer

    home, settings = Home.find(), load_settings()
    with open_job_store(settings, home) as store:
        server = WebhooksServer(
            webhook_secret=load_tokens(home.tokens_file).webhook, settings=settings.receiver
        )
        server.add_webhook("/retrain")(retrain_handler(store, retrain_rules(settings, home)))
        server.launch(server_name=host, server_port=port)


def serve(
    release: Annotated[
        str | None,
        typer.Argument(help="A release id or any checkpoint folder; by default the served one."),
    ] = None,
    pipeline: Annotated[str | None, typer.Option(help="Which one, of several.")] = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Serve completions from a release, port 8000."""
    from pipeline.settings import load_settings

    home, settings = Home.find(), load_settings()
    configured = settings.pipeline(pipeline)
    try:
        from serving.engines.torch_engine import create_engine
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"serving needs {error.name}; install the extra: pip install 'hotpush[torch]'"
        ) from None
