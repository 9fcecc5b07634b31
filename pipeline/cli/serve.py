"""`pipeline serve` and `pipeline gateway`: run a completion server, or the gateway to several."""

import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from jobs.errors import StoreError
from jobs.folder import COMPUTING
from pipeline.cli.terminal import PipelineOption, without_none
from pipeline.errors import PipelineError
from pipeline.logs import log_to_stderr
from pipeline.paths import Home
from pipeline.retrain.settings import HUGGING_FACE
from pipeline.runner.job_store import is_token_of_running_job
from pipeline.settings import Settings, load_settings
from pipeline.stack.gateway import create_app as create_gateway
from pipeline.tokens import Tokens, load_tokens
from receiver import listen
from serving.http.server import Server
from serving.settings import ServingSettings

if TYPE_CHECKING:
    from serving.engine import Engine
    from serving.follow import Follower

app = typer.Typer()


@app.command()
def serve(
    release: Annotated[
        str | None, typer.Argument(help="A release id or a checkpoint folder.")
    ] = None,
    pipeline: PipelineOption = None,
    engine: Annotated[
        Literal["auto", "torch", "vllm"] | None,
        typer.Option(help="Overrides `engine` in the settings."),
    ] = None,
    host: Annotated[str | None, typer.Option(help="Overrides `host` in the settings.")] = None,
    port: Annotated[int | None, typer.Option(help="Overrides `port` in the settings.")] = None,
    follow: Annotated[
        str | None,
        typer.Option(metavar="OWNER/NAME", help="Serve the release that this model repository is."),
    ] = None,
    endpoint: Annotated[
        str,
        typer.Option(envvar="HF_ENDPOINT", help="The hub of --follow. Its token is in HF_TOKEN."),
    ] = HUGGING_FACE,
    releases: Annotated[
        Path | None, typer.Option(help="Where the releases are; by default, in the state folder.")
    ] = None,
) -> None:
    """Run the completion server, on port 8000 by default.

    The server serves RELEASE until somebody swaps in another release. Without RELEASE, it begins
    with the release that was served last, and then swaps in the pending release (chosen, but not
    served yet), if there is one.

    With --follow, no pipeline need be configured: the server fetches the branch `main` of a model
    repository from a hub, and serves it; and again whenever `main` has moved.
    """
    from serving.app import create_app
    from serving.app import serve as serve_app

    home, settings = Home.find(), load_settings()
    log_to_stderr(settings.logs, "serve")
    tokens = load_tokens(home.tokens_file)
    if release is not None and follow is not None:
        raise PipelineError(f"--follow chooses what is served: leave {release!r} or --follow out")
    folder = Path(release) if release is not None and Path(release).is_dir() else None
    if follow is not None:
        name, own_port = pipeline or follow.rpartition("/")[2], settings.serving.port
    elif folder is not None and not settings.pipelines:
        # A checkpoint folder can be served even if no pipeline is configured. Requests then give
        # the name of the folder as `model`.
        name, own_port = folder.resolve().name, settings.serving.port
    else:
        configured = settings.pipeline(pipeline)
        name, own_port = configured.name, settings.server_port(configured)
    serving = settings.serving.model_copy(
        update=without_none(host=host, port=own_port if port is None else port, engine=engine)
    )
    own_dir = home.releases_dir if follow is None else home.followed_dir
    pipeline_dir = (releases or own_dir / name).absolute()
    if release is not None and folder is None:
        folder = pipeline_dir / release
    pipeline_dir.mkdir(parents=True, exist_ok=True)
    app = create_app(
        engine=_engine(serving, busy_lock_file=home.jobs_dir / COMPUTING),
        settings=serving,
        pipeline_dir=pipeline_dir,
        pipeline=name,
        admin_token=tokens.admin,
        job_may_swap=lambda token: _job_may_swap(token, settings, home, tokens, name),
        folder=folder,
        follower=None if follow is None else _follower(follow, endpoint, serving, tokens),
    )
    serve_app(app, serving)


@app.command()
def gateway() -> None:
    """Run the gateway: one address, on port 8000 by default, for the servers of several pipelines.
    The field `model` of a request chooses the pipeline."""
    from serving.app import SHUTDOWN_SECONDS, bind

    settings = load_settings()
    log_to_stderr(settings.logs, "gateway")
    serving = settings.serving
    servers = {each.name: settings.server_url(each) for each in settings.pipelines}
    if not servers:
        raise PipelineError("no pipeline is configured, so there is nothing to answer for")
    app = create_gateway(servers, max_body_bytes=serving.max_body_bytes)
    listening = bind(serving)
    print(f"gateway on {listen.url_of(listening, serving.host)}", flush=True)
    listen.serve(Server(app, shutdown_seconds=SHUTDOWN_SECONDS), listening)


def _job_may_swap(
    token: str, settings: Settings, home: Home, tokens: Tokens, pipeline: str
) -> bool:
    """Raises RequestError 503 if the job store fails: a job then asks again."""
    from serving.request_errors import RequestError

    try:
        return is_token_of_running_job(token, settings, home, tokens, pipeline=pipeline)
    except StoreError as error:
        raise RequestError(503, str(error)) from error


def _follower(repo: str, endpoint: str, serving: ServingSettings, tokens: Tokens) -> "Follower":
    from serving.follow import Follower
    from serving.weights.fetch import Source

    is_any = serving.host in ("0.0.0.0", "::")
    host = socket.gethostname() if is_any else serving.host
    return Follower(
        source=Source(endpoint=endpoint.rstrip("/"), repo=repo, token=os.environ.get("HF_TOKEN")),
        seconds=serving.follow_seconds,
        secret=os.environ.get("WEBHOOK_SECRET") or tokens.webhook,
        name=f"{socket.gethostname()}:{serving.port}",
        url=f"http://{host}:{serving.port}",
    )


def _engine(settings: ServingSettings, *, busy_lock_file: Path) -> "Engine":
    from serving.engines.settings import choose_engine

    engine = choose_engine(settings.engine).name
    extra = "vllm" if engine == "vllm" else "torch"
    try:
        match engine:
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
