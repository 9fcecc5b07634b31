"""Answers a request: admits it, generates with its release, and sends the answer as one body or as
a stream of events.

A route gives a `Plan`, which says what to generate and how to write the choices. If the client
disconnects, the request ends and its slot in the engine becomes free at once.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response

from serving.admission import Admission, LiveRelease, NothingServed, QueueFull
from serving.chat_schemas import ChatPrompt
from serving.detokenizer import Delta
from serving.engine import Engine, Generation
from serving.event_stream import EventStream, unless_disconnected
from serving.metrics import Metrics, RequestTimes, WaitingRequest
from serving.openai_schemas import SamplingRequest
from serving.request_errors import (
    model_not_found,
    nothing_served,
    queue_full,
    release_not_live,
    unavailable,
)
from serving.sequences import GeneratedSequence, generate
from serving.settings import ServingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

LARGE_BODY_BYTES = 4096
"""If a request body is larger, its prompt is tokenised in a thread. The prompt of a smaller body
takes only one or two milliseconds."""
LARGE_ANSWER_TOKENS = 1024
"""An answer with more tokens is written in a thread. The tokens of the prompts count too, and with
`logprobs`, each reported alternative counts as one more token. Each takes some microseconds."""


class Plan(Protocol):
    """What to generate for an admitted request, and how its route writes the answer."""

    @property
    def request(self) -> SamplingRequest: ...
    @property
    def id_prefix(self) -> str: ...
    @property
    def objects(self) -> tuple[str, str]:
        """The field `object` of a complete answer, and of a chunk of a stream."""

    @property
    def generations(self) -> list[Generation]:
        """`num_each` generations for the first prompt, then `num_each` for the second, …"""

    @property
    def num_each(self) -> int:
        """How many sequences are generated for each prompt."""

    @property
    def num_prompt_tokens(self) -> int: ...
    def choices(self, sequences: list[GeneratedSequence]) -> Iterable[dict[str, Any]]:
        """The choices of a complete answer, from the complete `sequences`."""

    def chunks(self, index: int, delta: Delta) -> Iterable[str]:
        """The choices of a stream, as JSON, for a delta of the sequence with this index. Empty if
        the delta adds nothing that the client should see."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Generates the answer to one admitted request, and writes it."""

    engine: Engine
    live: LiveRelease
    metrics: Metrics
    model: str
    plan: Plan
    started: float
    """When the request arrived: a value of `time.perf_counter`."""
    waiting: WaitingRequest
    """Counts this request and its sequences as waiting until their first steps."""
    id: str
    threads: ThreadPoolExecutor
    created: int = field(default_factory=lambda: int(time.time()))

    async def body(self) -> bytes:
        """The complete answer. Raises EngineError."""
        sequences = [GeneratedSequence() for _ in self.plan.generations]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                sequences[index].add(delta)
        num_tokens = self.plan.num_prompt_tokens + sum(each.num_tokens for each in sequences)
        num_top = max(each.num_logprobs or 0 for each in self.plan.generations)
        if num_tokens * (1 + num_top) > LARGE_ANSWER_TOKENS:
            return await in_thread(self.threads, self._written, sequences)
        return self._written(sequences)

    def _written(self, sequences: list[GeneratedSequence]) -> bytes:
        # Write each choice by itself, because no other thread can run while one value is written.
        choices = ",".join(map(_json, self.plan.choices(sequences)))
        usage = self._usage(
            [each.num_tokens for each in sequences],
            [each.num_cached_tokens for each in sequences],
        )
        head = _json(self._head(self.plan.objects[0]))[:-1]
        return f'{head},"choices":[{choices}],"usage":{_json(usage)}}}'.encode()

    async def events(self) -> AsyncGenerator[str, None]:
        """The answer as server-sent events; `[DONE]` is the last one. Raises EngineError."""
        # All events begin with the same text, up to the choices. Write this text only once, not
        # for each token.
        start = "data: " + json.dumps(self._head(self.plan.objects[1]))[:-1] + ', "choices": ['
        generations, request = self.plan.generations, self.plan.request
        end = '], "usage": null}\n\n' if request.includes_usage else "]}\n\n"
        num_new, num_cached = [0] * len(generations), [0] * len(generations)
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                num_new[index] += delta.num_tokens
                num_cached[index] = max(num_cached[index], delta.num_cached_tokens)
                if request.includes_continuous_usage:
                    num_prompt = len(generations[index].prompt)
                    usage = _usage(num_prompt, num_new[index], num_cached[index])
                    end = f'], "usage": {json.dumps(usage)}}}\n\n'
                chunks = self.plan.chunks(index, delta)
                if len(delta.prompt_logprobs or ()) > LARGE_ANSWER_TOKENS:
                    chunks = await in_thread(self.threads, list, chunks)
                for choice in chunks:
                    yield f"{start}{choice}{end}"
        if request.includes_usage:
            yield f'{start}], "usage": {json.dumps(self._usage(num_new, num_cached))}}}\n\n'
        yield "data: [DONE]\n\n"

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that name the release, its dataset commit, its job, and the damaged
        release for which it is the substitute. A chat also gets the kinds of rows that the release
        was trained on, if it was trained on no conversation."""
        lineage = self.live.release.lineage
        headers = {"X-Model-Release": self.live.id}
        if lineage.dataset_revision is not None:
            headers["X-Dataset-Revision"] = lineage.dataset_revision
        if lineage.job_id is not None:
            headers["X-Job-Id"] = lineage.job_id
        if self.live.stands_in_for is not None:
            headers["X-Stands-In-For"] = self.live.stands_in_for.id
        is_chat = isinstance(self.plan.request, ChatPrompt)
        if is_chat and lineage.rows and "messages" not in lineage.rows:
            headers["X-Trained-On"] = ", ".join(lineage.rows)
            _tell_no_chat(self.live.id, headers["X-Trained-On"])
        return headers

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all sequences, each with the index of its sequence. Also measures times,
        and counts tokens, for the metrics."""
        plan = self.plan
        times = RequestTimes(
            self.metrics,
            self.waiting,
            release_id=self.live.id,
            started=self.started,
            num_prompt=plan.num_prompt_tokens,
            prompt_lengths=[len(each.prompt) for each in plan.generations],
            num_each=plan.num_each,
        )
        generated = generate(self.engine, self.live, plan.generations, plan.request)
        try:
            async with aclosing(generated) as deltas:
                async for index, delta in deltas:
                    times.add(index, delta)
                    yield index, delta
        finally:
            times.end()

    def _head(self, object: str) -> dict[str, str | int]:
        return {
            "id": f"{self.plan.id_prefix}-{self.id}",
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.live.id,
        }

    def _usage(self, num_new: list[int], num_cached: list[int]) -> dict[str, Any]:
        # Several sequences may have the same prompt. Count the tokens of this prompt only once, and
        # also count its cached tokens only once.
        num_found = sum(num_cached[:: self.plan.num_each])
        return _usage(self.plan.num_prompt_tokens, sum(num_new), num_found)


@lru_cache(1)
def _tell_no_chat(release: str, rows: str) -> None:
    logger.warning(
        "%s is asked for chat, but it was trained on rows of %s, without the chat template; ask "
        "/v1/completions, or train on `messages`",
        release,
        rows,
    )


def _usage(num_prompt: int, num_new: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers the requests to one pipeline."""

    engine: Engine
    admission: Admission
    settings: ServingSettings
    metrics: Metrics
    pipeline: str
    planners: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="answers-plan")
    )
    """Threads that tokenise prompts and render chat templates. No swap waits for these threads."""
    writers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(2, thread_name_prefix="answers-write")
    )
    """Threads that write large answers. They are separate from `planners`, so that no answer waits
    for a slow template."""

    async def respond(
        self, request: Request, asked: SamplingRequest, plan: Callable[[LiveRelease], Plan]
    ) -> Response:
        """The answer to `request`, whose parsed body is `asked`. `plan` makes the plan for the
        release that the request gets.

        Raises RequestError, which `plan` may raise too; TimeoutError if the answer takes longer
        than `request_seconds`; and EngineError. But an error while a stream is generated is not
        raised: it becomes an error event or an error response (`EventStream`).
        """
        started = time.perf_counter()
        deadline = asyncio.get_running_loop().time() + self.settings.request_seconds
        route = request.url.path
        with ExitStack() as leaving:
            # If a request asks for more than `max_sequences`, `plan` refuses it. So do not count
            # more sequences as waiting.
            num_sequences = min(asked.num_sequences, self.settings.max_sequences)
            waiting = WaitingRequest(self.metrics, num_sequences)
            leaving.callback(waiting.end)
            async with asyncio.timeout_at(deadline):
                live = await self.admit(request, asked.model)
            leaving.callback(self.admission.leave, live)
            is_chat = isinstance(asked, ChatPrompt)
            if is_chat or len(await request.body()) > LARGE_BODY_BYTES:
                # No running stream should wait for a long prompt or a slow chat template.
                async with asyncio.timeout_at(deadline):
                    planning = in_thread(self.planners, plan, live)
                    planned = await unless_disconnected(request.receive, planning)
            else:
                planned = plan(live)
            answer = Answer(
                engine=self.engine,
                live=live,
                metrics=self.metrics,
                model=asked.model or self.pipeline,
                plan=planned,
                started=started,
                waiting=waiting,
                id=asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex,
                threads=self.writers,
            )
            if asked.stream:
                leave = leaving.pop_all().close

                def end(status: int) -> None:
                    leave()
                    self.metrics.requests.labels(route, status).inc()

                return EventStream(
                    answer.events(), headers=answer.headers, deadline=deadline, on_end=end
                )
            async with asyncio.timeout_at(deadline):
                content = await unless_disconnected(request.receive, answer.body())
            self.metrics.requests.labels(route, 200).inc()
            return Response(content, headers=answer.headers, media_type="application/json")

    async def admit(self, request: Request, model: str | None) -> LiveRelease:
        """The release for `request`, which asks for `model`. Pass it to `admission.leave` when the
        request ends. Raises RequestError."""
        if self.admission.is_stopping:
            raise unavailable("the server is stopping")
        entering = asyncio.create_task(self.admission.enter())
        try:
            live = await unless_disconnected(request.receive, entering)
        except QueueFull:
            raise queue_full(self.settings.max_queue) from None
        except NothingServed:
            raise nothing_served(self.pipeline, self.admission.unserved) from None
        except BaseException:
            # `enter` may have succeeded in the same turn of the event loop in which the deadline
            # passed. Then the request has entered and must leave.
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                self.admission.leave(entering.result())
            raise
        exact = request.headers.get("x-exact-release")
        if exact is not None and exact != live.id:
            self.admission.leave(live)
            raise release_not_live(exact, live.id)
        if model not in (None, self.pipeline, live.id):
            self.admission.leave(live)
            raise model_not_found(model, self.pipeline)
        return live


async def in_thread(threads: ThreadPoolExecutor, function: Callable[..., T], *args: Any) -> T:
    """The result of `function`, which runs in one of `threads`. A call that is cancelled before a
    thread is free does not run."""
    return await asyncio.get_running_loop().run_in_executor(threads, function, *args)
