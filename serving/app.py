"""The OpenAI-compatible application over one pipeline's live release. Routes only: parse, admit,
generate, answer."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from serving.admission import Admission, LiveRelease, NothingServed, QueueFull
from serving.answer import Answer
from serving.api_keys import is_one_of, load_api_keys
from serving.chat import chat_body, chat_events, plan_chat
from serving.completions import completion_body, completion_events, plan_completion
from serving.engine import Engine, EngineError
from serving.metrics import Metrics
from serving.openai_schemas import ChatRequest, CompletionRequest, SamplingRequest
from serving.request_errors import RequestError, from_validation, unavailable
from serving.responses import ClientGone, EventStream, unless_disconnected
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapRequest

logger = logging.getLogger(__name__)

R = TypeVar("R", bound=BaseModel)
Body = Coroutine[Any, Any, dict[str, Any]]
Events = AsyncGenerator[str, None]

SWAP_STATUS = {"live": 200, "refused": 422, "superseded": 409, "deferred": 503, "failed": 500}
RETRY_AFTER_SECONDS = 1
LARGE_BODY_BYTES = 2**16


def create_app(
    *,
    engine: Engine,
    settings: ServingSettings,
    releases_dir: Path,
    pipeline: str,
    admin_token: str,
    folder: Path | None = None,
) -> FastAPI:
    """The application over `releases_dir`, which is `<home>/releases/<pipeline>`.

    On start it serves `folder` if given, else the current and then the pending release; on shutdown
    it closes `engine`. Raises ServingError for API keys that cannot be read.
    """
    api_keys = load_api_keys(settings)
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
    metrics.waiting.set_function(lambda: admission.num_waiting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await swapper.start(folder)
        try:
            yield
        finally:
            await swapper.close()
            await engine.close()

    app = FastAPI(title="hotpush", lifespan=lifespan, openapi_url=None)
    app.state.admission = admission
    _add_error_handlers(app, metrics)

    def check_model(live: LiveRelease, model: str | None) -> None:
        if model not in (None, pipeline, live.id):
            raise RequestError(
                404,
                f"model {model!r} is not served here; this server serves {pipeline!r}",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )

    async def admit(request: Request) -> LiveRelease:
        try:
            live = await unless_disconnected(request, admission.enter())
        except QueueFull:
            raise RequestError(
                429,
                f"{settings.max_queue} requests are being answered or wait; ask again later",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            ) from None
        except NothingServed:
            raise unavailable(
                f"{pipeline!r} has no release yet; push to its dataset, or swap one in",
                RETRY_AFTER_SECONDS,
            ) from None
        exact = request.headers.get("x-exact-release")
        if exact is not None and exact != live.id:
            admission.leave(live)
            raise RequestError(
                409,
                f"{exact!r} is not live, {live.id} is",
                type="conflict_error",
                code="release_not_live",
                headers={"X-Model-Release": live.id},
            )
        return live

    async def respond(
        request: Request,
        asked: SamplingRequest,
        kind: str,
        plan: Callable[[Answer], tuple[int, Callable[[], Body], Callable[[], Events]]],
    ) -> Response:
        """Admit once, answer on that release, leave."""
        started = time.perf_counter()
        deadline = None
        if settings.request_seconds is not None:
            deadline = asyncio.get_running_loop().time() + settings.request_seconds
        route = request.url.path
        async with asyncio.timeout_at(deadline):
            live = await admit(request)
        is_streaming = False
        try:
            check_model(live, asked.model)
            answer = Answer(
                engine=engine,
                live=live,
                metrics=metrics,
                model=asked.model or pipeline,
                kind=kind,
                started=started,
            )
            if request.state.num_body_bytes > LARGE_BODY_BYTES:
                # Tokenising takes a while, and nobody's stream should wait for it.
                planned = await asyncio.to_thread(plan, answer)
            else:
                planned = plan(answer)
            num_prompt_tokens, body, events = planned
            metrics.answers.labels(live.id).inc()
            metrics.prompt_tokens.labels(live.id).inc(num_prompt_tokens)
            if asked.stream:
                is_streaming = True

                def end(status: int) -> None:
                    admission.leave(live)
                    metrics.requests.labels(route, status).inc()

                return EventStream(
                    events(),
                    headers=answer.headers,
                    deadline=deadline,
                    translate=_translate,
                    on_end=end,
                )
            async with asyncio.timeout_at(deadline):
                content = await unless_disconnected(request, body())
            metrics.requests.labels(route, 200).inc()
            return _json(content, headers=answer.headers)
        finally:
            if not is_streaming:
                admission.leave(live)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        _check_api_key(request, api_keys)
        asked = await _parse(request, CompletionRequest, settings.max_body_bytes)

        def plan(answer: Answer) -> tuple[int, Callable[[], Body], Callable[[], Events]]:
            planned = plan_completion(asked, answer.live, settings.max_sequences)
            return (
                planned.num_prompt_tokens,
                lambda: completion_body(answer, planned),
                lambda: completion_events(answer, planned),
            )

        return await respond(request, asked, "cmpl", plan)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        _check_api_key(request, api_keys)
        asked = await _parse(request, ChatRequest, settings.max_body_bytes)

        def plan(answer: Answer) -> tuple[int, Callable[[], Body], Callable[[], Events]]:
            planned = plan_chat(asked, answer.live, settings.max_sequences)
            return (
                planned.num_prompt_tokens,
                lambda: chat_body(answer, planned),
                lambda: chat_events(answer, planned),
            )

        return await respond(request, asked, "chatcmpl", plan)

    def model_object(live: LiveRelease) -> dict[str, Any]:
        return {
            "id": pipeline,
            "object": "model",
            "created": live.live_since,
            "owned_by": "hotpush",
            "root": str(live.folder),
            "release": live.id,
            "previous": admission.previous,
            "dataset_revision": live.release.lineage.dataset_revision,
            "max_model_len": live.tokenizer.context_length,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        _check_api_key(request, api_keys)
        live = admission.live
        return _json({"object": "list", "data": [model_object(live)] if live else []})

    @app.get("/v1/models/{model:path}")
    async def model(request: Request, model: str) -> Response:
        _check_api_key(request, api_keys)
        if admission.live is None:
            raise unavailable(f"{pipeline!r} has no release yet", RETRY_AFTER_SECONDS)
        check_model(admission.live, model)
        return _json(model_object(admission.live))

    @app.get("/health")
    async def health() -> Response:
        live = admission.live
        if live is None:
            return _json({"status": "waiting"}, status=503)
        return _json(
            {
                "status": "ok",
                "release": live.id,
                "dataset_revision": live.release.lineage.dataset_revision,
            }
        )

    @app.get("/metrics")
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type="text/plain; version=0.0.4")

    @app.post("/admin/swap")
    async def swap(request: Request) -> Response:
        _check_bearer(request, (admin_token,), "the admin token")
        asked = await _parse(request, SwapRequest, settings.max_body_bytes)
        result = await swapper.swap(asked.release)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if result.result == "deferred" else None
        return _json(
            result.model_dump(mode="json"), status=SWAP_STATUS[result.result], headers=headers
        )

    return app


def _add_error_handlers(app: FastAPI, metrics: Metrics) -> None:
    async def on_error(request: Request, error: Exception) -> Response:
        problem = _translate(error)
        # Paths that exist only: a scanner must not fill the registry.
        route = request.scope.get("route")
        metrics.requests.labels(getattr(route, "path", "unknown"), problem.status).inc()
        return problem.response()

    for kind in (RequestError, EngineError, TimeoutError, ClientGone, HTTPException, Exception):
        app.add_exception_handler(kind, on_error)


def _translate(error: Exception) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, EngineError):
        return unavailable(f"the engine failed: {error}; ask again", RETRY_AFTER_SECONDS)
    if isinstance(error, TimeoutError):
        return RequestError(
            504,
            "the answer took longer than this server allows; ask for fewer tokens, or later",
            type="timeout_error",
            code="deadline_exceeded",
        )
    if isinstance(error, ClientGone):
        return RequestError(499, "the client hung up")
    if isinstance(error, HTTPException):
        code = {404: "route_not_found", 405: "method_not_allowed"}.get(error.status_code)
        return RequestError(
            error.status_code,
            str(error.detail),
            type="not_found_error" if error.status_code == 404 else "invalid_request_error",
            code=code,
            headers=error.headers,
        )
    logger.error("unexpected", exc_info=error)
    return RequestError(
        500, "an error of the server; its log has more", type="server_error", code="internal_error"
    )


async def _parse(request: Request, kind: type[R], max_bytes: int) -> R:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise RequestError(
                413, f"the body is larger than {max_bytes} bytes", code="body_too_large"
            )
    request.state.num_body_bytes = len(body)
    try:
        return kind.model_validate_json(bytes(body))
    except ValidationError as error:
        raise from_validation(error) from None


def _check_api_key(request: Request, api_keys: tuple[str, ...]) -> None:
    if api_keys:
        _check_bearer(request, api_keys, "an API key", wrong_status=401)


def _check_bearer(
    request: Request, tokens: tuple[str, ...], name: str, *, wrong_status: int = 403
) -> None:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise RequestError(
            401,
            f"{name} is needed: Authorization: Bearer …",
            type="authentication_error",
            code="missing_token",
            headers={"WWW-Authenticate": "Bearer"},
        )
    if not is_one_of(given.strip(), tokens):
        raise RequestError(
            wrong_status, f"not {name}", type="authentication_error", code="invalid_token"
        )


def _json(
    content: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        json.dumps(content, ensure_ascii=False),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )
