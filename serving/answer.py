"""Answers a request: admits it, generates with its release, and sends the answer as one body or as
a stream of events.

A route gives a `Plan`, which says what to generate and how to write the choices. If the client
disconnects, the request ends and its slot in the engine becomes free at once.
"""

import asyncio
import functools
import json
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, aclosing, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from serving.admission import Admission, LiveRelease
from serving.chat_schemas import ChatPrompt
from serving.detokenizer import Delta, TextReader, TokenText
from serving.engine import Engine, Generation, TokenLogprob
from serving.metrics import Metrics, RequestTimes
from serving.openai_schemas import SamplingRequest
from serving.request_errors import NO_RETRY, ClientGone, RequestError, model_not_found, translated
from serving.settings import ServingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

LARGE_BODY_BYTES = 4096
"""If a request body is larger, its prompt is tokenised in a thread. The prompt of a smaller body
takes only one or two milliseconds."""
LARGE_PROMPT_TOKENS = 1024
"""If a stream begins with the logprobs of a longer prompt, they are written in a thread. Each token
takes some microseconds."""
HEADER_SECONDS = 1.0
"""When a stream sends its headers at the latest. Most errors come sooner, and then have a status of
their own."""
COMMENT_SECONDS = 15.0
"""Time between two comments. Proxies drop a connection that is idle for 30 to 60 seconds."""


@dataclass(slots=True)
class GeneratedSequence:
    """A sequence, put together from its deltas."""

    text: str = ""
    tokens: list[TokenText] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None

    def add(self, delta: Delta) -> None:
        """Append the next delta."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.num_tokens += delta.num_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, delta.num_cached_tokens)
        self.finish_reason = delta.finish_reason
        self.stop_reason = delta.stop_reason
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs


async def generate(
    engine: Engine, live: LiveRelease, generations: list[Generation], request: SamplingRequest
) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of all sequences in the order of their arrival. Each comes with the index of its
    sequence in `generations`.

    If the iterator is closed, or if one sequence fails, all sequences end and their slots in the
    engine become free. Raises EngineError.
    """
    if len(generations) == 1:
        async with aclosing(_deltas(engine, live, generations[0], request)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    # If the client reads slowly, this queue holds at most as many deltas as there are sequences.
    # The engine may hold the further steps. If the client reads nothing for too long, the server
    # closes its connection (`READING_SECONDS` in `server.py`).
    queue: asyncio.Queue[tuple[int, Delta] | BaseException | None]
    queue = asyncio.Queue(maxsize=len(generations))
    is_read = True

    async def pump(number: int, generation: Generation) -> None:
        try:
            async with aclosing(_deltas(engine, live, generation, request)) as deltas:
                async for delta in deltas:
                    await queue.put((number, delta))
            await queue.put(None)
        except asyncio.CancelledError:
            raise
        # `BaseException` also covers a panic of a Rust library, which is not an `Exception`.
        except BaseException as error:
            if not is_read:
                raise  # nobody makes room in the queue any more
            await queue.put(error)

    tasks = [asyncio.create_task(pump(number, each)) for number, each in enumerate(generations)]
    try:
        num_running = len(tasks)
        while num_running:
            item = await queue.get()
            if item is None:
                num_running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                yield item
    finally:
        is_read = False
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _deltas(
    engine: Engine, live: LiveRelease, generation: Generation, request: SamplingRequest
) -> AsyncGenerator[Delta, None]:
    reader = TextReader(live.tokenizer, generation, request)
    steps = engine.generate(live.id, generation)
    try:
        async for step in steps:
            delta = reader.read(step)
            yield delta
            if delta.finish_reason is not None:
                return
    finally:
        await steps.aclose()  # type: ignore[attr-defined]


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
    model: str
    plan: Plan
    times: RequestTimes
    id: str
    created: int = field(default_factory=lambda: int(time.time()))

    async def body(self) -> bytes:
        """The complete answer. Raises EngineError."""
        sequences = [GeneratedSequence() for _ in self.plan.generations]
        async with aclosing(self._deltas()) as deltas:
            async for index, delta in deltas:
                sequences[index].add(delta)
        # A large answer takes long, and no running stream should wait for it.
        return await asyncio.to_thread(self._written, sequences)

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
                chunks = self.plan.chunks(index, delta)
                if len(delta.prompt_logprobs or ()) > LARGE_PROMPT_TOKENS:
                    chunks = await asyncio.to_thread(list, chunks)
                for choice in chunks:
                    yield f"{start}{choice}{end}"
        if request.includes_usage:
            yield f'{start}], "usage": {json.dumps(self._usage(num_new, num_cached))}}}\n\n'
        yield "data: [DONE]\n\n"

    @property
    def headers(self) -> dict[str, str]:
        """The HTTP headers that name the release, its dataset commit, its job, and the damaged
        release for which it is the substitute. If the release was trained on no row of the kind
        that is asked for (a conversation, or a prompt without template), a header says so."""
        lineage = self.live.release.lineage
        headers = {"X-Model-Release": self.live.id}
        if lineage.dataset_revision is not None:
            headers["X-Dataset-Revision"] = lineage.dataset_revision
        if lineage.job_id is not None:
            headers["X-Job-Id"] = lineage.job_id
        if self.live.stands_in_for is not None:
            headers["X-Stands-In-For"] = self.live.stands_in_for.id
        if isinstance(self.plan.request, ChatPrompt):
            is_known, other = "messages" in lineage.rows, "/v1/completions"
        else:
            has_template = self.live.tokenizer.chat_template is not None
            is_known = lineage.rows != ("messages",) or not has_template
            other = "/v1/chat/completions"
        if lineage.rows and not is_known:
            headers["X-Trained-On"] = ", ".join(lineage.rows)
            _tell_other_rows(self.live.id, headers["X-Trained-On"], other)
        return headers

    async def _deltas(self) -> AsyncGenerator[tuple[int, Delta], None]:
        """The deltas of all sequences, each with the index of its sequence."""
        plan = self.plan
        self.times.plan([len(each.prompt) for each in plan.generations], plan.num_each)
        generated = generate(self.engine, self.live, plan.generations, plan.request)
        async with aclosing(generated) as deltas:
            async for index, delta in deltas:
                self.times.add(index, delta)
                yield index, delta

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
        num_prompt = self.plan.num_prompt_tokens
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": sum(num_new),
            "total_tokens": num_prompt + sum(num_new),
            "prompt_tokens_details": {"cached_tokens": num_found},
        }


@functools.lru_cache(maxsize=64)  # each release once
def _tell_other_rows(release: str, rows: str, other: str) -> None:
    logger.warning(
        "%s was trained on rows of %s only, so it has never seen such a prompt: ask %s",
        release,
        rows,
        other,
    )


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers the requests to one pipeline."""

    engine: Engine
    admission: Admission
    settings: ServingSettings
    metrics: Metrics
    pipeline: str
    threads: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(4, thread_name_prefix="answers")
    )
    """Threads that tokenise prompts and render chat templates. No swap waits for these threads."""

    async def respond(
        self, request: Request, asked: SamplingRequest, plan: Callable[[LiveRelease], Plan]
    ) -> Response:
        """The answer to `request`, whose parsed body is `asked`. `plan` makes the plan for the
        release that the request gets.

        Raises RequestError, which `plan` may raise too; TimeoutError if the answer takes longer
        than `request_seconds`; and EngineError. But an error while a stream is generated is not
        raised: it becomes an error event or an error response (`EventStream`).
        """
        deadline = asyncio.get_running_loop().time() + self.settings.request_seconds
        if asked.num_sequences > self.settings.max_sequences:
            raise RequestError(
                400,
                f"more than {self.settings.max_sequences} sequences in one request (number of "
                "prompts times n)",
                param="prompt" if asked.n == 1 else "n",
                code="too_many_sequences",
            )
        with ExitStack() as leaving:
            times = RequestTimes(self.metrics, asked.num_sequences)
            leaving.callback(times.end)
            async with asyncio.timeout_at(deadline):
                live = await self.admit(request, asked.model)
                leaving.callback(self.admission.leave, live)
                if isinstance(asked, ChatPrompt) or len(await request.body()) > LARGE_BODY_BYTES:
                    # No running stream should wait for a long prompt or a slow chat template.
                    planned = await self.in_thread(request, plan, live)
                else:
                    planned = plan(live)
            answer = Answer(
                engine=self.engine,
                live=live,
                model=asked.model or self.pipeline,
                plan=planned,
                times=times,
                id=asked.request_id or request.headers.get("x-request-id") or uuid.uuid4().hex,
            )
            if asked.stream:
                return EventStream(
                    answer.events(),
                    headers=answer.headers,
                    deadline=deadline,
                    on_end=leaving.pop_all().close,
                )
            async with asyncio.timeout_at(deadline):
                content = await unless_disconnected(request.receive, answer.body())
            return Response(content, headers=answer.headers, media_type="application/json")

    async def in_thread(
        self, request: Request, plan: Callable[[LiveRelease], T], live: LiveRelease
    ) -> T:
        """The result of `plan`, which runs in one of `threads`. If the client disconnects before a
        thread is free, it does not run."""
        loop = asyncio.get_running_loop()
        running = loop.run_in_executor(self.threads, plan, live)
        return await unless_disconnected(request.receive, running)

    async def admit(self, request: Request, model: str | None) -> LiveRelease:
        """The release for `request`, which asks for `model`. Pass it to `admission.leave` when the
        request ends. Raises RequestError."""
        entering = asyncio.create_task(self.admission.enter())
        try:
            live = await unless_disconnected(request.receive, entering)
        except BaseException:
            # `enter` may have succeeded in the same turn of the event loop in which the deadline
            # passed. Then the request has entered and must leave.
            if entering.done() and not entering.cancelled() and entering.exception() is None:
                self.admission.leave(entering.result())
            raise
        exact = request.headers.get("x-exact-release")
        if exact is not None and exact != live.id:
            self.admission.leave(live)
            raise RequestError(
                409,
                f"{exact!r} is not live; the live release is {live.id}",
                type="conflict_error",
                code="release_not_live",
                headers={"X-Model-Release": live.id, **NO_RETRY},
            )
        if model not in (None, self.pipeline, live.id):
            self.admission.leave(live)
            raise model_not_found(model, self.pipeline)
        return live


class EventStream(Response):
    """Sends the events of a generator as server-sent events.

    The headers are sent with the first event, or after `HEADER_SECONDS`. Comments follow until the
    first event, so that no proxy drops a stream that waits in the queue of the engine. If an error
    occurs before the headers are sent, the client gets an error response. If it occurs later, the
    stream ends with an error event. It is also an error if the stream has not ended at `deadline`
    (a time of the event loop's clock). When the response ends, for any reason, `on_end`
    is called once.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[str, None],
        *,
        headers: Mapping[str, str],
        deadline: float,
        on_end: Callable[[], None],
    ) -> None:
        super().__init__(headers={**headers, "Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._events = events
        self._deadline = deadline
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(ClientGone):
                await unless_disconnected(receive, self._send(scope, receive, send))
        finally:
            try:
                await self._events.aclose()
            finally:
                self._on_end()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def write(content: str) -> None:
            nonlocal has_started
            if not has_started:
                has_started = True
                start = {"status": 200, "headers": self.raw_headers}
                await send({"type": "http.response.start", **start})
            body = {"body": content.encode(), "more_body": True}
            await send({"type": "http.response.body", **body})

        first = asyncio.ensure_future(self._first_event())
        try:
            try:
                async with asyncio.timeout_at(self._deadline):
                    seconds = HEADER_SECONDS
                    while not (await asyncio.wait({first}, timeout=seconds))[0]:
                        await write(": waiting\n\n")
                        seconds = COMMENT_SECONDS
                    await write(first.result())
                    async for event in self._events:
                        await write(event)
            finally:
                # The generator cannot be closed while a task waits for its first event.
                first.cancel()
                await asyncio.gather(first, return_exceptions=True)
        except Exception as error:
            response = translated(error).response()
            if not has_started:
                await response(scope, receive, send)
                return
            await write(f"data: {bytes(response.body).decode()}\n\ndata: [DONE]\n\n")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _first_event(self) -> str:
        return await anext(self._events)


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`. If the client disconnects before `work` ends, cancels `work` and raises
    ClientGone.

    If this function is cancelled in the same turn of the event loop in which `work` ends, the
    result of `work` is lost. A caller that must release this result should pass a task, and look at
    the task's result after the cancellation.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for each in (task, gone):
            each.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
