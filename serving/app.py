"""Builds the web application that serves one pipeline, with all its routes."""

import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from fastapi_offline import FastAPIOffline
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.admission import (
    Admission,
    LiveRelease,
    check_api_key,
    check_swap_token,
    load_api_keys,
)
from serving.answer import Answers
from serving.chat import add_chat
from serving.completions import add_completions
from serving.engine import Engine, EngineError
from serving.http.bodies import LimitedBodies, json_routes
from serving.http.cross_site import other_host
from serving.metrics import Metrics
from serving.openai_schemas import MAX_ID_LENGTH
from serving.request_errors import RETRY_AFTER, RequestError, model_not_found, translated
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapRequest
from serving.token_routes import add_token_routes

SWAP_STATUS = {"live": 200, "refused": 422, "superseded": 409, "deferred": 503, "failed": 500}

KEY_NEEDED = Depends(HTTPBearer(auto_error=False, description="One of the server's API keys."))
"""Says in the OpenAPI document that a key may be needed. The class of the route checks the key."""
ERRORS: dict[int | str, dict[str, Any]] = {"4XX": {"description": "The request has an error"}}
"""Without this, FastAPI would describe an answer 422, which no route gives."""


def create_app(
    *,
    engine: Engine,
    settings: ServingSettings,
    releases_dir: Path,
    pipeline: str,
    admin_token: str,
    job_may_swap: Callable[[str], bool] = lambda token: False,
    folder: Path | None = None,
) -> FastAPI:
    """The application that serves the releases in `releases_dir`, the folder
    `<home>/releases/<pipeline>`.

    When the application starts, it serves `folder`. If this is None, it serves the release that was
    live last, and then swaps in the pending release. When the application stops, it closes
    `engine`.

    A request for a swap needs `admin_token`, or a token for which `job_may_swap` returns true.
    `job_may_swap` is called in a thread, so it may wait for a database.

    Raises ServingError if `load_api_keys` does.
    """
    metrics = Metrics(pipeline)
    admission = Admission(settings.max_queue, pipeline)
    swapper = Swapper(
        engine=engine,
        admission=admission,
        settings=settings,
        releases_dir=releases_dir,
        pipeline=pipeline,
        metrics=metrics,
    )
    if engine.kv_cache_usage is not None:
        metrics.watch(
            "kv_cache_usage_perc",
            "KV cache in use; 1 means all of it",
            lambda: engine.kv_cache_usage or 0.0,
        )
    api_keys = load_api_keys(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await swapper.start(folder)
        try:
            yield
        finally:
            await swapper.close()
            await engine.close()

    app = FastAPIOffline(title="hotpush", redoc_url=None, lifespan=lifespan)
    app.add_exception_handler(HTTPException, _on_error)
    app.add_exception_handler(RequestValidationError, _on_error)
    app.add_middleware(LimitedBodies, max_body_bytes=settings.max_body_bytes)
    app.add_middleware(_Entrance, own_host=None if api_keys else settings.host.lower())
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
    keyed = APIRouter(
        route_class=json_routes(partial(check_api_key, keys=api_keys)),
        dependencies=[KEY_NEEDED],
        responses=ERRORS,
    )
    add_completions(keyed, answers)
    add_chat(keyed, answers)
    add_token_routes(keyed, answers)
    _add_models(keyed, answers)
    may_swap = partial(check_swap_token, admin_token=admin_token, job_may_swap=job_may_swap)
    admin = APIRouter(route_class=json_routes(may_swap), responses=ERRORS)
    _add_swap(admin, swapper)
    _add_own_routes(app, engine, admission, metrics)
    app.include_router(keyed)
    app.include_router(admin)
    return app


def _add_models(router: APIRouter, answers: Answers) -> None:
    def described(live: LiveRelease) -> dict[str, Any]:
        return {
            "id": answers.pipeline,
            "object": "model",
            "created": live.live_since,
            "owned_by": "hotpush",
            "root": str(live.folder),
            "release": live.id,
            "dataset_revision": live.release.lineage.dataset_revision,
            "max_model_len": live.context_length,
        }

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The live release, if there is one."""
        live = answers.admission.live
        return {"object": "list", "data": [described(live)] if live else []}

    @router.get("/v1/models/{model:path}")
    async def model(model: str) -> dict[str, Any]:
        """The live release. `model` is the name of the pipeline or the id of the release."""
        live = answers.admission.served()
        if model not in (answers.pipeline, live.id):
            raise model_not_found(model, answers.pipeline)
        return described(live)


def _add_swap(router: APIRouter, swapper: Swapper) -> None:
    token = Depends(HTTPBearer(auto_error=False, description="The admin token."))

    @router.post("/admin/swap", dependencies=[token])
    async def swap(asked: SwapRequest) -> Response:
        """Make another release live. The HTTP status and the body say how the swap ended."""
        result = await swapper.swap(asked.release, asked.instead_of)
        headers = RETRY_AFTER if result.result == "deferred" else None
        return JSONResponse(result.model_dump(mode="json"), SWAP_STATUS[result.result], headers)


def _add_own_routes(app: FastAPI, engine: Engine, admission: Admission, metrics: Metrics) -> None:
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

    @app.get("/version")
    async def show_version() -> dict[str, str]:
        """The version of this server, not of its engine."""
        return {"version": version("hotpush")}

    @app.get("/metrics", response_class=Response)
    async def prometheus() -> Response:
        """The metrics of the server, in the text format of Prometheus."""
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")


async def _on_error(_: Request, error: Exception) -> Response:
    return translated(error).response()


class _Entrance:
    """The outermost middleware, through which every request comes.

    Sends the header `X-Request-Id` of a request back with its answer. If the request has no such
    header, or one that is too long, it makes a new id and puts it into the request's headers, where
    the application reads it.

    If the server has no key, refuses requests over loopback whose header `Host` names another host
    than loopback or `own_host`, the address on which the server listens. A page of another site can
    make its own host name lead to this machine (DNS rebinding, `serving/http/cross_site.py`), and
    could then read the answers."""

    def __init__(self, app: ASGIApp, *, own_host: str | None) -> None:
        self._app = app
        self._own_host = own_host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not 0 < len(request_id) <= MAX_ID_LENGTH:
            request_id = uuid.uuid4().hex
            others = [each for each in scope["headers"] if each[0] != b"x-request-id"]
            scope["headers"] = [*others, (b"x-request-id", request_id.encode())]

        has_started = False

        async def send_named(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        if self._own_host is not None:
            host = other_host(headers, scope.get("server"), (self._own_host,))
            if host is not None:
                reason = "is not a name of this server: call 127.0.0.1 or localhost, or set"
                message = f"{host!r} {reason} [serving] api_key"
                app = RequestError(403, message, code="wrong_host").response()
        # FastAPI itself would answer an unexpected error outside all middlewares, so without
        # `X-Request-Id` and CORS headers.
        try:
            await app(scope, receive, send_named)
        except Exception as error:
            if has_started:
                raise
            await translated(error).response()(scope, receive, send_named)
