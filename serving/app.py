"""The OpenAI-compatible application over one pipeline's live release: its parts, and its routes."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from serving.admission import Admission, LiveRelease
from serving.answer import Answer
from serving.api_keys import bearer_of, check_api_key, is_one_of, load_api_keys, wrong_token
from serving.chat import chat_body, chat_events, plan_chat
from serving.completions import completion_body, completion_events, plan_completion
from serving.engine import Engine, EngineError
from serving.http.bodies import LimitedBodies
from serving.metrics import Metrics
from serving.openai_schemas import ChatRequest, CompletionRequest
from serving.request_errors import ClientGone, RequestError, translated
from serving.request_flow import RETRY_AFTER_SECONDS, Planned, RequestFlow
from serving.responses import json_response
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapRequest

SWAP_STATUS = {"live": 200, "refused": 422, "superseded": 409, "deferred": 503, "failed": 500}


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
    """The application over `releases_dir`, which is `<home>/releases/<pipeline>`.

    On start it serves `folder` if given, else the current and then the pending release; on shutdown
    it closes `engine`. A swap needs `admin_token`, or the token of a job that `job_may_swap`, which
    may wait for a database. Raises ServingError for API keys that cannot be read.
    """
    metrics = Metrics()
    admission = Admission(settings.max_queue)
    swapper = Swapper(
        engine=engine,
        admission=admission,
        settings=settings,
        releases_dir=releases_dir,
        pipeline=pipeline,
        metrics=metrics,
    )
    metrics.in_flight.set_function(lambda: admission.num_in_flight)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await swapper.start(folder)
        try:
            yield
        finally:
            await swapper.close()
            await engine.close()

    app = FastAPI(title="hotpush", lifespan=lifespan, openapi_url=None)
    app.add_middleware(LimitedBodies, max_body_bytes=settings.max_body_bytes)
    app.state.admission = admission
    flow = RequestFlow(
        engine=engine,
        admission=admission,
        settings=settings,
        metrics=metrics,
        pipeline=pipeline,
    )
    _add_error_handlers(app, metrics)
    _add_openai_routes(app, flow, load_api_keys(settings))
    _add_own_routes(app, flow, swapper, admin_token, job_may_swap)
    return app


def _add_openai_routes(app: FastAPI, flow: RequestFlow, api_keys: tuple[str, ...]) -> None:
    def check(request: Request) -> None:
        if api_keys:
            check_api_key(request, api_keys)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        check(request)
        asked = await flow.parse(request, CompletionRequest)

        def plan(answer: Answer) -> Planned:
            planned = plan_completion(asked, answer.live, flow.settings.max_sequences)
            return (
                planned.num_prompt_tokens,
                lambda: completion_body(answer, planned),
                lambda: completion_events(answer, planned),
            )

        return await flow.respond(request, asked, "cmpl", plan)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        check(request)
        asked = await flow.parse(request, ChatRequest)

        def plan(answer: Answer) -> Planned:
            planned = plan_chat(asked, answer.live, flow.settings.max_sequences)
            return (
                planned.num_prompt_tokens,
                lambda: chat_body(answer, planned),
                lambda: chat_events(answer, planned),
            )

        return await flow.respond(request, asked, "chatcmpl", plan)

    def model_object(live: LiveRelease) -> dict[str, Any]:
        return {
            "id": flow.pipeline,
            "object": "model",
            "created": live.live_since,
            "owned_by": "hotpush",
            "root": str(live.folder),
            "release": live.id,
            "previous": flow.admission.previous,
            "dataset_revision": live.release.lineage.dataset_revision,
            "max_model_len": live.context_length,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        check(request)
        live = flow.admission.live
        return json_response({"object": "list", "data": [model_object(live)] if live else []})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        check(request)
        if flow.admission.live is None:
            raise flow.nothing_served()
        flow.check_model(flow.admission.live, model)
        return json_response(model_object(flow.admission.live))


def _add_own_routes(
    app: FastAPI,
    flow: RequestFlow,
    swapper: Swapper,
    admin_token: str,
    job_may_swap: Callable[[str], bool],
) -> None:
    @app.get("/live")
    async def alive() -> Response:
        """Whether the server works. It also does while it has no release."""
        try:
            await flow.engine.take_turn()
        except EngineError as error:
            return json_response({"status": "dead", "reason": str(error)}, status=503)
        return json_response({"status": "ok"})

    @app.get("/health")
    async def health() -> Response:
        """Whether to send requests here."""
        live = flow.admission.live
        if flow.admission.is_stopping:
            return json_response({"status": "stopping"}, status=503)
        if (failure := flow.engine.failure) is not None:
            return json_response({"status": "failed", "reason": failure}, status=503)
        if live is None:
            unserved = flow.admission.unserved
            reason = {} if unserved is None else {"reason": str(unserved)}
            return json_response({"status": "waiting", **reason}, status=503)
        stands_in = live.stands_in_for
        return json_response(
            {
                "status": "ok",
                "release": live.id,
                "dataset_revision": live.release.lineage.dataset_revision,
                **(
                    {}
                    if stands_in is None
                    else {"stands_in_for": stands_in.id, "reason": str(stands_in)}
                ),
            }
        )

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(flow.metrics.render(), media_type="text/plain; version=0.0.4")

    @app.post("/admin/swap")
    async def swap(request: Request) -> Response:
        given = bearer_of(request, "the admin token")
        if not is_one_of(given, (admin_token,)) and not await run_in_threadpool(
            job_may_swap, given
        ):
            raise wrong_token("the admin token, and not that of a running job", status=403)
        asked = await flow.parse(request, SwapRequest)
        result = await swapper.swap(asked.release)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if result.result == "deferred" else None
        return json_response(
            result.model_dump(mode="json"), status=SWAP_STATUS[result.result], headers=headers
        )


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        problem = translated(error)
        # Paths that exist only: a scanner must not fill the registry.
        route = request.scope.get("route")
        metrics.requests.labels(getattr(route, "path", "unknown"), problem.status).inc()
        return problem.response()

    for kind in (RequestError, EngineError, TimeoutError, ClientGone, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)
