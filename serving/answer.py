"""Answers a request: admits it, generates with its release, and sends the answer as one body or as
a stream of events.

A route gives a `Plan`, which says what to generate and how to write the choices. If the client
disconnects, the request ends and its slot in the engine becomes free at once.
"""

import asyncio
import functools
import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any, ClassVar
from urllib.parse import quote

from fastapi import Request, Response
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from serving.admission import Admission, LoadedRelease
from serving.detokenizer import Delta, TextReader
from serving.engine import Engine, Generation
from serving.metrics import Metrics, RequestTimes
from serving.openai_schemas import SamplingRequest
from serving.request_errors import RequestError, invalid, model_not_found, translated
from serving.settings import ServingSettings

_json = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode

LARGE_BODY_BYTES = 4096
"""If a request body is larger, its prompt is tokenised in a thread. The prompt of a smaller body
takes only one or two milliseconds."""
LARGE_PROMPT_TOKENS = 1024
"""The logprobs of a longer prompt are written in a thread."""
HEADER_SECONDS = 1.0
"""When a stream sends its headers at the latest. Most errors come sooner, and then have a status of
their own."""
COMMENT_SECONDS = 15.0
"""Time between two comments. Proxies drop a connection that is idle for 30 to 60 seconds."""
_COMMENT = ": waiting\n\n"
_threads = ThreadPoolExecutor(4, thread_name_prefix="answers")
"""Threads that tokenise prompts and render chat templates. No swap waits for these threads."""


Deltas = AsyncGenerator[tuple[int, Delta], None]
"""Each delta comes with the index of its sequence in the generations of the request."""


async def generate(
    engine: Engine, live: LoadedRelease, generations: list[Generation], request: SamplingRequest
) -> Deltas:
    """The deltas of all sequences in the order of their arrival.

    If the iterator is closed, or if one sequence fails, all sequences end and their slots in the
    engine become free. Raises EngineError.
    """
    if len(generations) == 1:
        async with aclosing(_deltas(engine, live, generations[0], request)) as deltas:
            async for delta in deltas:
                yield 0, delta
        return
    streams = [_deltas(engine, live, each, request) for each in generations]

    async def step(number: int) -> tuple[int, Delta]:
        return number, await anext(streams[number])

    done: set[asyncio.Task[tuple[int, Delta]]] = set()
    running = {asyncio.create_task(step(number)) for number in range(len(streams))}
    try:
        while running:
            done, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            # In the order of the sequences: clients expect that the first one begins.
            for number, delta in sorted((task.result() for task in done), key=itemgetter(0)):
                # Nothing is asked of the engine while a client reads slowly. If it reads nothing
                # for too long, the server closes its connection (`READING_SECONDS` in `app.py`).
                yield number, delta
                if delta.finish_reason is None:
                    running.add(asyncio.create_task(step(number)))
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*done, *running, return_exceptions=True)
        await asyncio.gather(*(each.aclose() for each in streams), return_exceptions=True)


async def _deltas(
    engine: Engine, live: LoadedRelease, generation: Generation, request: SamplingRequest
) -> AsyncGenerator[Delta, None]:
    reader = TextReader(live.tokenizer, generation, request)
    async with aclosing(engine.generate(live.id, generation)) as steps:
        async for step in steps:
            delta = reader.read(step)
            if delta.finish_reason is not None:
                await steps.aclose()  # so that its slot in the engine becomes free at once
            yield delta


def joined(deltas: list[Delta], first: Delta) -> Delta:
    """A whole sequence, from all its deltas. `first` has the logprobs of its prompt."""
    return replace(
        deltas[-1],
        text="".join(each.text for each in deltas),
        tokens=tuple(chain.from_iterable(each.tokens for each in deltas)),
        step=first.step,
    )


@dataclass(frozen=True, kw_only=True)
class Plan(ABC):
    """What to generate for an admitted request. Each route has its own plan, which writes the
    choices. A plan keeps state: use it for one answer only."""

    id_prefix: ClassVar[str]
    objects: ClassVar[tuple[str, str]]
    """The field `object` of a complete answer, and of a chunk of a stream."""

    request: SamplingRequest
    live: LoadedRelease
    generations: list[Generation]
    """`request.n` generations for the first prompt, then as many for the second, …"""
    asked_as: tuple[str, ...] = ()
    """The rows in whose words the model is asked, instead of those of the request."""
    begun: set[int] = field(default_factory=set)
    """The indices of the sequences of which a part is written already."""

    @abstractmethod
    def choice(self, index: int, part: Delta, *, is_whole: bool) -> dict[str, Any] | None:
        """The choice for a part of the sequence with this index, or with `is_whole` for all of it.
        None if a part adds nothing that the client should see."""

    def usage(self, times: RequestTimes) -> dict[str, Any]:
        """The tokens of the answer. `request.n` sequences have the same prompt: it is counted only
        once, and so are its cached tokens."""
        num_prompt = sum(len(each.prompt) for each in self.generations[:: self.request.n])
        num_new = sum(times.num_new)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_new,
            "total_tokens": num_prompt + num_new,
            "prompt_tokens_details": {"cached_tokens": sum(times.num_cached[:: self.request.n])},
        }


MakePlan = Callable[[LoadedRelease], Plan]
Head = dict[str, str | int]
"""The fields with which an answer and each chunk of a stream begin."""


async def whole(plan: Plan, head: Head, generated: Deltas, times: RequestTimes) -> bytes:
    """The complete answer. Raises EngineError."""
    sequences: list[list[Delta]] = [[] for _ in plan.generations]
    async with aclosing(generated) as deltas:
        async for index, delta in deltas:
            times.add(index, delta, len(plan.generations[index].prompt))
            sequences[index].append(delta)

    def written() -> bytes:
        # Write each choice by itself, because no other thread can run while one value is written.
        # The logprobs of a prompt are computed only for its first sequence.
        firsts = [sequences[index - index % plan.request.n][0] for index in range(len(sequences))]
        parts = enumerate(map(joined, sequences, firsts))
        choices = ",".join(_json(plan.choice(index, part, is_whole=True)) for index, part in parts)
        end = _json(plan.usage(times))
        return f'{_json(head)[:-1]},"choices":[{choices}],"usage":{end}}}'.encode()

    # A large answer takes long, and no running stream should wait for it.
    return await asyncio.to_thread(written)


async def events(
    plan: Plan, head: Head, generated: Deltas, times: RequestTimes
) -> AsyncGenerator[str, None]:
    """The answer as server-sent events; `[DONE]` is the last one. Raises EngineError."""
    # All events begin with the same text, up to the choices. Write this text only once, not for
    # each token.
    start = f'data: {json.dumps(head)[:-1]}, "choices": ['
    options = plan.request.stream_options
    includes_usage = options is not None and options.include_usage
    end = '], "usage": null}\n\n' if includes_usage else "]}\n\n"
    async with aclosing(generated) as deltas:
        async for index, delta in deltas:
            times.add(index, delta, len(plan.generations[index].prompt))
            if len(delta.step.prompt_logprobs or ()) > LARGE_PROMPT_TOKENS:
                choice = await asyncio.to_thread(plan.choice, index, delta, is_whole=False)
            else:
                choice = plan.choice(index, delta, is_whole=False)
            if choice is not None:
                yield f"{start}{json.dumps(choice)}{end}"
    if includes_usage:
        yield f'{start}], "usage": {json.dumps(plan.usage(times))}}}\n\n'
    yield "data: [DONE]\n\n"


def headers_of(live: LoadedRelease, *, is_chat: bool) -> dict[str, str]:
    """The HTTP headers that name the release, its dataset commit, its job, and the damaged release
    for which it is the substitute. If the release was trained on no row of the kind that is asked
    for (a conversation, or a prompt without template), a header says so."""
    lineage, stands_in_for = live.release.lineage, live.stands_in_for
    headers = {
        "X-Model-Release": live.id,
        "X-Dataset-Revision": lineage.dataset_revision,
        "X-Job-Id": lineage.job_id,
        "X-Stands-In-For": None if stands_in_for is None else stands_in_for.id,
    }
    if is_chat:
        is_known = "messages" in lineage.rows
    else:
        is_known = lineage.rows != ("messages",) or live.tokenizer.chat_template is None
    if lineage.rows and not is_known:
        headers["X-Trained-On"] = ", ".join(lineage.rows)
    return {name: value for name, value in headers.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Answers the requests to one pipeline."""

    engine: Engine
    admission: Admission
    settings: ServingSettings
    metrics: Metrics
    pipeline: str

    def respond(self, request: Request, asked: SamplingRequest, make_plan: MakePlan) -> Response:
        """The answer to `request`, whose parsed body is `asked`. `make_plan` makes the plan for the
        release that the request gets. The answer is made while it is sent.

        While it is sent, it raises RequestError, as `make_plan` does; TimeoutError if the answer
        takes longer than `request_seconds`; and EngineError. But an error after the headers of a
        stream were sent becomes an error event.
        """
        return WhileConnected(functools.partial(self._answer, request, asked, make_plan))

    async def _answer(
        self, request: Request, asked: SamplingRequest, make_plan: MakePlan, send: Send
    ) -> None:
        if asked.num_sequences > (limit := self.settings.max_sequences):
            reason = f"more than {limit} sequences in one request (number of prompts times n)"
            raise invalid("prompt" if asked.n == 1 else "n", reason, code="too_many_sequences")
        times = RequestTimes(self.metrics, asked.num_sequences)
        stream = _EventStream(send)
        try:
            async with (
                asyncio.timeout(self.settings.request_seconds),
                self.admitted(request, asked.model) as live,
            ):
                if asked.is_chat or len(await request.body()) > LARGE_BODY_BYTES:
                    # No running stream should wait for a long prompt or a slow chat template.
                    plan = await asyncio.wrap_future(_threads.submit(make_plan, live))
                else:
                    plan = make_plan(live)
                request_id = request.headers.get("x-request-id") or uuid.uuid4().hex
                head: Head = {
                    "id": f"{plan.id_prefix}-{request_id}",
                    "object": plan.objects[1 if asked.stream else 0],
                    "created": int(time.time()),
                    "model": asked.model or self.pipeline,
                    "system_fingerprint": live.id,
                }
                headers = headers_of(live, is_chat=asked.is_chat)
                if plan.asked_as:
                    headers["X-Asked-As"] = ", ".join(map(quote, plan.asked_as))
                generated = generate(self.engine, live, plan.generations, plan.request)
                if asked.stream:
                    await stream.send(events(plan, head, generated, times), headers)
                    return
                content = await whole(plan, head, generated, times)
        except Exception as error:
            if not stream.has_begun:
                raise
            told = translated(error)
            await stream.write(f"data: {json.dumps(told.body)}\n\ndata: [DONE]\n\n", is_end=True)
            if told.status_code == 500:
                raise  # the HTTP server writes it to the log
            return
        finally:
            times.end()
        response = Response(content, headers=headers, media_type="application/json")
        await response(request.scope, request.receive, send)

    @asynccontextmanager
    async def admitted(self, request: Request, model: str | None) -> AsyncIterator[LoadedRelease]:
        """The release for `request`, which asks for `model`. The request has ended when the block
        ends. Raises RequestError."""
        live = await self.admission.enter()
        try:
            exact = request.headers.get("x-exact-release")
            if exact not in (None, live.id):
                raise RequestError(
                    409,
                    f"{exact!r} is not live; the live release is {live.id}",
                    headers={"X-Model-Release": live.id},
                )
            if model not in (None, self.pipeline, live.id):
                raise model_not_found(model, self.pipeline)
            yield live
        finally:
            self.admission.leave(live)


class _EventStream:
    """Sends server-sent events to one client."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.has_begun = False

    async def send(self, stream: AsyncGenerator[str, None], headers: dict[str, str]) -> None:
        """Send all events of `stream`. Raises the error of the first one before the headers, if it
        comes in time."""
        async with aclosing(stream):
            first = asyncio.ensure_future(anext(stream))
            tasks: list[asyncio.Future[Any]] = [first]
            try:
                await asyncio.wait({first}, timeout=HEADER_SECONDS)
                if first.done():
                    first.result()
                kind = {"Content-Type": "text/event-stream; charset=utf-8"}
                raw = Headers({**headers, **kind, "Cache-Control": "no-cache"}).raw
                await self._send({"type": "http.response.start", "status": 200, "headers": raw})
                self.has_begun = True
                if not first.done():
                    await self.write(_COMMENT)
                tasks.append(asyncio.ensure_future(self._comment()))
                await self.write(await first)
                async for event in stream:
                    await self.write(event)
            finally:
                # The events cannot be closed while a task waits for the first one.
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        await self.write("", is_end=True)

    async def _comment(self) -> None:
        while True:
            await asyncio.sleep(COMMENT_SECONDS)
            await self.write(_COMMENT)

    async def write(self, text: str, *, is_end: bool = False) -> None:
        body = {"body": text.encode(), "more_body": not is_end}
        await self._send({"type": "http.response.body", **body})


class WhileConnected(Response):
    """A response that `work` sends. If the client disconnects, `work` is cancelled."""

    def __init__(self, work: Callable[[Send], Awaitable[None]]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._work(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
        finally:
            for each in (task, gone):
                each.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
