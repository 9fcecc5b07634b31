"""`RequestFlow`: parse, admit once, answer on that release, leave. What is answered is a plan's."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import Request, Response
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from serving.admission import Admission, LiveRelease, NothingServed, QueueFull
from serving.answer import Answer
from serving.engine import Engine
from serving.metrics import Metrics, WaitingRequest
from serving.openai_schemas import SamplingRequest
from serving.request_errors import ClientGone, RequestError, from_validation, unavailable
from serving.responses import EventStream, json_response, unless_disconnected
from serving.settings import ServingSettings

R = TypeVar("R", bound=BaseModel)
Body = Coroutine[Any, Any, dict[str, Any]]
Events = AsyncGenerator[str, None]
Planned = tuple[int, Callable[[], Body], Callable[[], Events]]
"""How many tokens the prompt has, the whole answer, and the streamed one."""
Plan = Callable[[Answer], Planned]
"""For an admitted request. Raises RequestError."""

RETRY_AFTER_SECONDS = 1
LARGE_BODY_BYTES = 2**16


@dataclass(frozen=True, kw_only=True)
class RequestFlow:
    engine: Engine
    admission: Admission
    settings: ServingSettings
    metrics: Metrics
    pipeline: str

    async def respond(
        self,
        request: Request,
        asked: SamplingRequest,
        kind: str,
        plan: Plan,
    ) -> Response:
        """Admit once, answer on that release, leave."""
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.settings.request_seconds
        route = request.url.path
        if self.admission.is_stopping:
            raise unavailable("the server is stopping", RETRY_AFTER_SECONDS)
        with ExitStack() as leaving:
            waiting = WaitingRequest(self.metrics.waiting)
            leaving.callback(waiting.end)
            async with asyncio.timeout_at(deadline):
                live = await self._admit(request)
            leaving.callback(self.admission.leave, live)
            self.check_model(live, asked.model)
            answer = Answer(
                engine=self.engine,
                live=live,
                metrics=self.metrics,
                model=asked.model or self.pipeline,
                kind=kind,
                started=started,
                waiting=waiting,
            )
            if request.state.num_body_bytes > LARGE_BODY_BYTES:
                # Tokenising takes a while, and nobody's stream should wait for it.
                planned = await asyncio.to_thread(plan, answer)
            else:
                planned = plan(answer)
            num_prompt_tokens, body, events = planned
            self.metrics.answers.labels(live.id).inc()
            self.metrics.prompt_tokens.labels(live.id).inc(num_prompt_tokens)
            if asked.stream:
                leave = leaving.pop_all().close

                def end(status: int) -> None:
                    leave()
                    self.metrics.requests.labels(route, status).inc()

                return EventStream(
                    events(),
                    headers=answer.headers,
                    deadline=deadline,
                    on_end=end,
                )
            async with asyncio.timeout_at(deadline):
                content = await unless_disconnected(request, body())
            self.metrics.requests.labels(route, 200).inc()
            return json_response(content, headers=answer.headers)

    def check_model(self, live: LiveRelease, model: str | None) -> None:
        if model not in (None, self.pipeline, live.id):
            raise RequestError(
                404,
                f"model {model!r} is not served here; this server serves {self.pipeline!r}",
                type="not_found_error",
                param="model",
                code="model_not_found",
            )

    def nothing_served(self) -> RequestError:
        unserved = self.admission.unserved
        return unavailable(
            f"{self.pipeline!r} has no release yet; push to its dataset, or swap one in"
            if unserved is None
            else f"{unserved}; no older release stands in for it; run `pipeline releases repair`",
            RETRY_AFTER_SECONDS,
        )

    async def _admit(self, request: Request) -> LiveRelease:
        entering = asyncio.create_task(self.admission.enter())
        try:
            live = await unless_disconnected(request, entering)
        except QueueFull:
            raise RequestError(
                429,
                f"{self.settings.max_queue} requests are being answered or wait; ask again later",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": str(RETRY_AFTER_SECONDS)},
            ) from None
        except NothingServed:
            raise self.nothing_served() from None
        except BaseException:
            # The deadline may have passed in the very turn in which the request was let in.
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                self.admission.leave(entering.result())
            raise
        exact = request.headers.get("x-exact-release")
        if exact is not None and exact != live.id:
            self.admission.leave(live)
            raise RequestError(
                409,
                f"{exact!r} is not live, {live.id} is",
                type="conflict_error",
                code="release_not_live",
                headers={"X-Model-Release": live.id},
            )
        return live

    async def parse(self, request: Request, kind: type[R]) -> R:
        """The request's body. Raises RequestError."""
        body = bytearray()
        try:
            async for piece in request.stream():
                body += piece
                if len(body) > self.settings.max_body_bytes:
                    raise RequestError(
                        413,
                        f"the body is larger than {self.settings.max_body_bytes} bytes",
                        code="body_too_large",
                    )
        except ClientDisconnect:
            raise ClientGone from None
        request.state.num_body_bytes = len(body)
        try:
            return kind.model_validate_json(bytes(body))
        except ValidationError as error:
            raise from_validation(error) from None
