"""`pipeline hub`, `pipeline receiver`, `pipeline serve` and `pipeline gateway`: each command runs
one service of the stack."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import typer

from jobs.folder import COMPUTING
from pipeline.cli.options import PipelineOption
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.settings import ServingSettings

HostOption = Annotated[
    str | None, typer.Option(help="The address to listen on. Overrides `host` in the settings.")
]
EngineOption = Literal["auto", "torch", "vllm", "sglang"]

PortOption = Annotated[
    int | None, typer.Option(help="The port to listen on. Overrides `port` in the settings.")
]


def hub(host: str | None, port: int | None) -> None:
    """Run the hub."""
    from pipeline.hub.app import create_app
    from pipeline.hub.server import serve
    from pipeline.job_store import open_job_store
    from pipeline.logs import log_to_stderr
    from pipeline.push_remarks import PushRemarks
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens
    from pipeline.traces import needed_commits

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "hub")
    hub_settings = settings.hub.model_copy(update=_without_none(host=host, port=port))
    tokens = load_tokens(home.tokens_file)
    with open_job_store(settings, home) as store:
        app = create_app(
            hub_settings,
            home.hub_dir,
            token=tokens.hub,
            secret_key=tokens.key.encode(),
            jobs_store=store,
            needed_commits=partial(needed_commits, home, store),
            remarks_on=PushRemarks(
                [each for each in settings.pipelines if settings.is_on_own_hub(each)], home
            ),
        )
        serve(app, hub_settings)


def receiver(
    host: str | None, port: int | None, tunnel: str | None, public_url: str | None
) -> None:
    """Run the webhook receiver."""
    from pipeline.job_store import open_job_store
    from pipeline.logs import log_to_stderr
    from pipeline.other_hubs import credentials_of_other_hubs
    from pipeline.retrain.settings import is_git_url
    from pipeline.rules import retrain_rules
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens, secret_in_shell
    from receiver.monitoring import add_live_route, measure
    from receiver.retrain import retrain_handler
    from receiver.senders import PushSender
    from receiver.server import WebhooksServer
    from receiver.settings import ReceiverSettings
    from receiver.tunnel import HubCredentials

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "receiver")
    tokens = load_tokens(home.tokens_file)
    receiver_settings = {
        **settings.receiver.model_dump(exclude_unset=True),
        **_without_none(tunnel=tunnel, public_url=public_url),
    }
    with open_job_store(settings, home) as store:
        server = WebhooksServer(
            webhook_secret=tokens.webhook,
            settings=ReceiverSettings.model_validate(receiver_settings),
            hubs=[
                HubCredentials(endpoint=settings.hub_url, token=tokens.hub),
                *credentials_of_other_hubs(settings, home, tokens),
            ],
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
        server.launch(server_name=host, server_port=port, share=server.settings.tunnel is not None)


def serve(
    release: Annotated[
        str | None,
        typer.Argument(
            help="A release id or a checkpoint folder. Without RELEASE, the server begins with the "
            "release that was served last, and then swaps in the pending release (chosen, but not "
            "served yet), if there is one."
        ),
    ] = None,
    pipeline: PipelineOption = None,
    engine: Annotated[
        EngineOption | None,
        typer.Option(help="What computes the answers. Overrides `engine` in the settings."),
    ] = None,
    upstream: Annotated[
        str | None, typer.Option(help="The URL of the SGLang server, for --engine sglang.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="A file with the API keys that are accepted, one per line.")
    ] = None,
    host: HostOption = None,
    port: PortOption = None,
) -> None:
    """Run the completion server, on port 8000 by default.

    The server serves RELEASE until somebody swaps in another release.
    """
    from pipeline.job_store import is_token_of_running_job
    from pipeline.logs import log_to_stderr
    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens
    from serving.app import create_app
    from serving.server import serve as serve_app

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "serve")
    tokens = load_tokens(home.tokens_file)
    folder = Path(release) if release is not None and Path(release).is_dir() else None
    if folder is not None and not settings.pipelines:
        # A checkpoint folder can be served even if no pipeline is configured. Requests then give
        # the name of the folder as `model`.
        name, own_port = folder.resolve().name, settings.serving.port
    else:
        configured = settings.pipeline(pipeline)
        name, own_port = configured.name, settings.server_port(configured)
    serving = settings.serving.model_copy(
        update=_without_none(
            host=host,
            port=own_port if port is None else port,
            engine=engine,
            upstream=upstream,
            api_key_file=api_key_file,
        )
    )
    releases_dir = home.releases_dir / name
    if release is not None and folder is None:
        folder = releases_dir / release
    releases_dir.mkdir(parents=True, exist_ok=True)
    app = create_app(
        engine=_engine(serving, busy_lock_file=home.jobs_dir / COMPUTING),
        settings=serving,
        releases_dir=releases_dir,
        pipeline=name,
        admin_token=tokens.admin,
        job_may_swap=lambda token: is_token_of_running_job(
            token, settings, home, tokens, pipeline=name
        ),
        folder=folder,
    )
    serve_app(app, serving)


def gateway(host: HostOption = None, port: PortOption = None) -> None:
    """Run the gateway: one address, on port 8000 by default, for the servers of several pipelines.
    The field `model` of a request chooses the pipeline."""
    from pipeline.gateway import create_app
    from pipeline.logs import log_to_stderr
    from pipeline.settings import load_settings
    from receiver import listen
    from serving.http.server import Server, http_config
    from serving.server import SHUTDOWN_SECONDS, bind

    settings = load_settings()
    log_to_stderr(settings.logs, "gateway")
    serving = settings.serving.model_copy(update=_without_none(host=host, port=port))
    servers = {each.name: settings.server_url(each) for each in settings.pipelines}
    if not servers:
        raise PipelineError("no pipeline is configured, so there is nothing to answer for")
    app = create_app(servers, max_body_bytes=serving.max_body_bytes)
    listening = bind(serving)
    print(f"gateway on {listen.url_of(listening, serving.host)}", flush=True)
    listen.serve(Server(http_config(app, shutdown_seconds=SHUTDOWN_SECONDS)), listening)


def _engine(settings: "ServingSettings", *, busy_lock_file: Path) -> "Engine":
    from serving.engine_choice import choose_engine

    engine = choose_engine(settings.engine).name
    extra = "vllm" if engine == "vllm" else "torch"
    try:
        match engine:
            case "sglang":
                from serving.engines.sglang_engine import SglangEngine

                return SglangEngine(settings.upstream, settings.dtype)
            case "vllm":
                from serving.engines import vllm_engine

                return vllm_engine.create_engine(dtype=settings.dtype, **settings.vllm.model_dump())
            case "torch":
                from serving.engines.torch_engine import engine as torch_engine

                return torch_engine.create_engine(
                    dtype=settings.dtype,
                    busy_lock_file=busy_lock_file,
                    **settings.torch.model_dump(),
                )
    except ModuleNotFoundError as error:
        raise PipelineError(
            f"--engine {engine} needs {error.name}; install it in the folder of hotpush: "
            f"pip install -e '.[{extra}]'"
        ) from None


def _without_none(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}
