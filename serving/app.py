"""Builds the web application that serves one pipeline, and runs it on its port."""

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from prometheus_client import generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.admission import (
    Admission,
    LoadedRelease,
    check_api_key,
    check_swap_token,
    check_webhook_secret,
    json_routes,
)
from serving.answer import Answers
from serving.chat import add_chat
from serving.completions import add_completions
from serving.engine import Engine, EngineError
from serving.engines.settings import choose_engine
from serving.errors import ServingError
from serving.http.server import (
    LimitedBodies,
    Limits,
    Server,
    freeze_imports,
    is_only_loopback,
    listening_socket,
    other_host,
)
from serving.metrics import Metrics
from serving.request_errors import RETRY_AFTER, RequestError, model_not_found, translated
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapRequest

if TYPE_CHECKING:
    from serving.follow import Follower

SWAP_STATUS = {"live": 200, "refused": 422, "superseded": 409, "deferred": 503, "failed": 500}

SHUTDOWN_SECONDS = 10
"""How long running requests may continue after the server was told to stop."""
READING_SECONDS = 30
"""How long a client may read nothing of its answer. By default a swap waits longer (`drain_seconds`
is 60), so such a client does not defer the swap."""
MAX_OTHERS = 256
"""How many connections may be open in addition to `max_queue`: for health checks and idle clients.
"""
SIGNAL_SECONDS = 1.0
"""How long the server waits for the cancellation that follows a Ctrl-C."""

BEARER = Depends(HTTPBearer(auto_error=False, description="The API key, or the admin token."))
"""Says in the OpenAPI document that a token may be needed. The class of the route checks it."""
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "The request has an error"}}
"""Without this, FastAPI would describe an answer 422, which no route gives."""


def create_app(
    *,
    engine: Engine,
    settings: ServingSettings,
    pipeline_dir: Path,
    pipeline: str,
    admin_token: str,
    job_may_swap: Callable[[str], bool] = lambda token: False,
    folder: Path | None = None,
    follower: "Follower | None" = None,
) -> FastAPI:
    """The application that serves the releases in `pipeline_dir`, the folder
    `<home>/releases/<pipeline>`.

    When the application starts, it serves `folder`. If this is None, it serves the release that was
    live last, and then swaps in the pending release. From then on, it serves what `follower` finds
    on a hub. When the application stops, it closes `engine`.

    A request for a swap needs `admin_token`, or a token for which `job_may_swap` returns true.
    `job_may_swap` is called in a thread, so it may wait for a database.
    """
    metrics = Metrics(pipeline)
    admission = Admission(settings.max_queue, pipeline)
    swapper = Swapper(
        engine=engine,
        admission=admission,
        settings=settings,
        pipeline_dir=pipeline_dir,
        pipeline=pipeline,
        metrics=metrics,
    )
    metrics.kv_cache_usage.set_function(lambda: engine.kv_cache_usage)
    api_key = None if settings.api_key is None else settings.api_key.get_secret_value()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await swapper.start(folder)
        following = None if follower is None else asyncio.create_task(follower.run(swapper))
        try:
            yield
        finally:
            if following is not None:
                following.cancel()
                await asyncio.wait({following})
            await swapper.close()
            await engine.close()

    app = FastAPIOffline(title="hotpush", redoc_url=None, lifespan=lifespan, responses=ERRORS)
    for each in (HTTPException, RequestValidationError, EngineError, TimeoutError):
        app.add_exception_handler(each, _on_error)
    # The middleware that is added last runs first.
    app.add_middleware(LimitedBodies, max_body_bytes=settings.max_body_bytes)
    if api_key is None:
        app.add_middleware(_KnownHosts, own_host=settings.host.lower())
    # Inside the CORS middleware, because a page can read only an answer with its headers.
    app.add_middleware(ServerErrorMiddleware, handler=_on_error)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["*"],
        )
    app.state.admission = admission

    answers = Answers(
        engine=engine, admission=admission, settings=settings, metrics=metrics, pipeline=pipeline
    )
    has_key = partial(check_api_key, key=api_key)
    keyed = APIRouter(route_class=json_routes(has_key), dependencies=[BEARER])
    add_completions(keyed, answers)
    add_chat(keyed, answers)

    def described(live: LoadedRelease) -> dict[str, Any]:
        return {
            "id": pipeline,
            "object": "model",
            "created": live.live_since,
            "owned_by": "hotpush",
            "root": str(live.folder),
            "release": live.id,
            "dataset_revision": live.release.lineage.dataset_revision,
            "max_model_len": live.context_length,
        }

    @keyed.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The live release, if there is one."""
        live = admission.live
        return {"object": "list", "data": [described(live)] if live else []}

    @keyed.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The live release. `model` is the name of the pipeline or the id of the release."""
        live = admission.served()
        if model not in (pipeline, live.id):
            raise model_not_found(model, pipeline)
        return described(live)

    may_swap = partial(check_swap_token, admin_token=admin_token, job_may_swap=job_may_swap)
    admin = APIRouter(route_class=json_routes(may_swap), dependencies=[BEARER])

    @admin.post("/admin/swap")
    async def swap(asked: SwapRequest) -> Response:
        """Make another release live. The HTTP status and the body say how the swap ended."""
        result = await swapper.swap(asked.release, asked.instead_of)
        headers = RETRY_AFTER if result.result == "deferred" else None
        return JSONResponse(result.model_dump(mode="json"), SWAP_STATUS[result.result], headers)

    _add_state(app, engine, admission, metrics)
    app.include_router(keyed)
    app.include_router(admin)
    if follower is not None:
        has_secret = partial(check_webhook_secret, secret=follower.secret)
        told = APIRouter(route_class=json_routes(has_secret))

        @told.post("/admin/follow", status_code=202)
        async def follow() -> dict[str, str]:
            """Look at once whether the followed repository has another release: the route for a
            webhook of this repository."""
            follower.wake()
            return {"follows": follower.source.repo}

        app.include_router(told)
    return app


def _add_state(app: FastAPI, engine: Engine, admission: Admission, metrics: Metrics) -> None:
    """The routes that tell how the server is. They need no key."""

    @app.get("/live")
    async def alive() -> Response:
        """Whether the server works. It works even while it has no release."""
        try:
            await engine.take_turn()
        except EngineError as error:
            return JSONResponse({"status": "dead", "reason": str(error)}, 503)
        return JSONResponse({"status": "ok"})

    @app.head("/health", include_in_schema=False)
    @app.get("/health")
    async def health() -> Response:
        """Whether clients should send requests to this server."""
        if (failure := engine.failure) is not None:
            return JSONResponse({"status": "failed", "reason": failure}, 503)
        live, unserved = admission.live, admission.unserved
        if live is None:
            reason = {} if unserved is None else {"reason": str(unserved)}
            return JSONResponse({"status": "waiting", **reason}, 503)
        body = {
            "status": "ok",
            "release": live.id,
            "dataset_revision": live.release.lineage.dataset_revision,
        }
        if live.stands_in_for is not None:
            body |= {"stands_in_for": live.stands_in_for.id, "reason": str(live.stands_in_for)}
        return JSONResponse(body)

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """The metrics of the server, in the text format of Prometheus."""
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")


async def _on_error(_: Request, error: Exception) -> Response:
    return translated(error).response()


class _KnownHosts:
    """Refuses requests over loopback whose header `Host` names another host than loopback or
    `own_host`, the address on which the server listens. A page of another site can make its own
    host name lead to this machine (DNS rebinding, `serving/http/server.py`), and could then read
    the answers."""

    def __init__(self, app: ASGIApp, *, own_host: str) -> None:
        self._app = app
        self._own_host = own_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http":
            host = other_host(Headers(scope=scope), scope.get("server"), (self._own_host,))
            if host is not None:
                reason = "is not a name of this server: call 127.0.0.1 or localhost, or set"
                message = f"{host!r} {reason} [serving] api_key"
                app = RequestError(403, message, code="wrong_host").response()
        await app(scope, receive, send)


def serve(app: FastAPI, settings: ServingSettings) -> None:
    """Serve until SIGINT or SIGTERM. Prints the address, then the engine and the release.

    Raises ServingError if `bind` does, and ReleaseError if the folder that should be served has
    faults.

    The socket listens before the application looks for a pending release, so that no release is
    forgotten. A job first marks its release as pending and then sends its swap request. If the
    connection is refused, the next server that starts finds the mark. If the connection succeeds,
    the server answers the request after its start.
    """
    with bind(settings) as listener:
        host, port = listener.getsockname()[:2]
        print(f"serving on http://{host}:{port}", flush=True)
        limits = Limits(
            max_connections=settings.max_queue + MAX_OTHERS, reading_seconds=READING_SECONDS
        )
        # `_serve` runs the lifespan itself: uvicorn would print a traceback for an error.
        server = Server(app, shutdown_seconds=SHUTDOWN_SECONDS, limits=limits, lifespan="off")
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            try:
                runner.run(_serve(app, settings, server, listener))
            except asyncio.CancelledError:
                # End by SIGTERM, so that the parent process sees this signal in the exit status.
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.raise_signal(signal.SIGTERM)


async def _serve(
    app: FastAPI, settings: ServingSettings, server: Server, listener: socket.socket
) -> None:
    task = asyncio.current_task()
    assert task is not None
    is_told_to_stop = False

    def stop() -> None:
        nonlocal is_told_to_stop
        if not server.started:
            # The server does not serve yet, so there is no request to wait for.
            task.cancel()
        # Let the server end its running requests. Then the task is cancelled below.
        server.should_exit = is_told_to_stop = True

    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
    async with app.router.lifespan_context(app):
        admission = app.state.admission
        live = admission.live
        if live is None:
            served = str(admission.unserved or "no requests until the first release is live")
        else:
            in_place = f" in place of {live.stands_in_for.id}" if live.stands_in_for else ""
            served = f"{live.id} from {live.folder}{in_place}"
        choice = choose_engine(settings.engine)
        why = f" ({choice.reason})" if settings.engine == "auto" else ""
        print(f"engine {choice.name}{why}; answers: {served}", flush=True)
        freeze_imports()
        await server.serve(sockets=[listener])
        if is_told_to_stop:
            task.cancel()
        # After SIGTERM, the cancellation above ends this wait. After Ctrl-C, the runner cancels
        # this task in the next turn of the event loop.
        await asyncio.sleep(SIGNAL_SECONDS)


def bind(settings: ServingSettings) -> socket.socket:
    """A listening socket for the address in the settings.

    Raises ServingError if the address cannot be used, for example because another program uses the
    port, or if other machines can reach it but no API key is set.
    """
    try:
        if settings.api_key is None and not is_only_loopback(settings.host):
            raise ServingError(
                f"others can reach {settings.host}; set [serving] api_key, or listen on 127.0.0.1"
            )
        return listening_socket(settings.host, settings.port)
    except socket.gaierror as error:
        raise ServingError(f"no address was found for {settings.host}: {error}") from None
    except OSError as error:
        raise ServingError(
            f"cannot listen on {settings.host}:{settings.port}: {os.strerror(error.errno or 0)}; "
            "choose another address under [serving] or [[pipelines]]"
        ) from None
