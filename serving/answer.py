"""What the two completion routes share: who answers, how sequences are run and how they merge."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from serving.admission import LiveRelease
from serving.engine import Engine, Generation
from serving.metrics import Metrics, WaitingRequest
from serving.sequences import Delta, Sequence, generate_text


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One admitted request: the release that it is answered by, and what every body says."""

    engine: Engine
    live: LiveRelease
    metrics: Metrics
    model: str
    kind: str
    """`cmpl` or `chatcmpl`."""
    started: float
    """When the request arrived, by `time.perf_counter`."""
    waiting: WaitingRequest
    """Ends with the first step of any sequence."""
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def head(self, object: str) -> dict[str, str | int]:
        return {
            "id": f"{self.kind}-{self.id}",
            "object": object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.live.id,
        }

    def chunk_start(self, object: str) -> str:
        """A server-sent event up to its choices, written once and not per token."""
        return "data: " + json.dumps(self.head(object))[:-1] + ', "choices": ['

    @property
    def headers(self) -> dict[str, str]:
        lineage = self.live.release.lineage
        headers = {"X-Model-Release": self.live.id}
        if lineage.dataset_revision is not None:
            headers["X-Dataset-Revision"] = lineage.dataset_revision
        if lineage.job_id is not None:
            headers["X-Job-Id"] = lineage.job_id
        if self.live.stands_in_for is not None:
            headers["X-Stands-In-For"] = self.live.stands_in_for.id
        return headers

    async def deltas(
        self, generation: Generation, stops: tuple[str, ...]
    ) -> AsyncGenerator[Delta, None]:
        """One sequence, timed and counted."""
        first = self.metrics.first_token_seconds.labels(self.live.id)
        interval = self.metrics.token_interval_seconds.labels(self.live.id)
        new_tokens = self.metrics.new_tokens.labels(self.live.id)
        before: float | None = None
        async with aclosing(generate_text(self.engine, self.live, generation, stops)) as deltas:
            async for delta in deltas:
                now = time.perf_counter()
                if before is None:
                    self.waiting.end()
                    first.observe(now - self.started)
                else:
                    for _ in range(delta.num_tokens):
                        interval.observe((now - before) / delta.num_tokens)
                before = now
                new_tokens.inc(delta.num_tokens)
                yield delta

    async def whole(self, generation: Generation, stops: tuple[str, ...]) -> Sequence:
        sequence = Sequence()
        async with aclosing(self.deltas(generation, stops)) as deltas:
            async for delta in deltas:
                sequence.add(delta)
        return sequence

    async def all_whole(
        self, generations: list[Generation], stops: tuple[str, ...]
    ) -> list[Sequence]:
        """All at the same time; when one fails or the caller is cancelled, all end."""
        if len(generations) == 1:
            return [await self.whole(generations[0], stops)]
        tasks = [asyncio.create_task(self.whole(each, stops)) for each in generations]
        try:
            return await asyncio.gather(*tasks)
        finally:
            await _end(tasks)

    async def merged(
        self, generations: list[Generation], stops: tuple[str, ...]
    ) -> AsyncGenerator[tuple[int, Delta], None]:
        """Deltas of all sequences as they come, each with the number of its sequence."""
        if len(generations) == 1:
            async with aclosing(self.deltas(generations[0], stops)) as deltas:
                async for delta in deltas:
                    yield 0, delta
            return
        queue: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

        async def pump(number: int, generation: Generation) -> None:
            try:
                async with aclosing(self.deltas(generation, stops)) as deltas:
                    async for delta in deltas:
                        queue.put_nowait((number, delta))
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

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
            await _end(tasks)


def usage(num_prompt: int, num_new: int, num_cached: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_new,
        "total_tokens": num_prompt + num_new,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }


async def _end(tasks: list[asyncio.Task[Sequence]] | list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
