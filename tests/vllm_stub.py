"""`VllmProcess` without vLLM: what `VllmEngine` needs of it, and the ways in which it dies."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING, cast

from serving.engine import EngineError, Generation, StageError, Step
from serving.engines.vllm_settings import VllmEngineSettings
from serving.weights.release import Release
from tests.echo_engine import EchoEngine

if TYPE_CHECKING:
    from serving.engines.vllm_process import VllmProcess


class StubbedVllm:
    """Starts processes that compute as the echo engine does."""

    def __init__(self, *, way: str = "copy", step_seconds: float = 0.001) -> None:
        self.way = way
        self.step_seconds = step_seconds
        self.start_seconds = 0.0
        self.fails_starts = 0
        """So many starts from now on."""
        self.hangs_starts = 0
        """So many starts from now on never end."""
        self.dies_in: str | None = None
        """`stage`, `commit`, `generate` or `turn`: the process dies the next time it is told to."""
        self.hangs_in: str | None = None
        self.started: Counter[str] = Counter()
        """Starts, by release."""
        self.process: StubProcess | None = None

    async def start(
        self, release: Release, folder: Path, settings: VllmEngineSettings
    ) -> "VllmProcess":
        self.started[release.id] += 1
        await asyncio.sleep(self.start_seconds if self.started.total() > 1 else 0)
        if self.hangs_starts:
            self.hangs_starts -= 1
            await asyncio.Event().wait()
        if self.fails_starts:
            self.fails_starts -= 1
            raise StageError("no start")
        self.process = StubProcess(self, release)
        await self.process.stage(release, folder)
        await self.process.commit(release.id)
        return cast("VllmProcess", self.process)


class StubProcess:
    kv_cache_usage = 0.0

    def __init__(self, stub: StubbedVllm, release: Release) -> None:
        self._stub = stub
        self._echo = EchoEngine(holds_two=False, step_seconds=stub.step_seconds)
        self.way = stub.way
        self.release_id = release.id
        self.is_dead = False

    @property
    def num_running(self) -> int:
        return self._echo.num_running.total()

    async def take_turn(self) -> None:
        await self._meet("turn")

    def holds(self, release_id: str) -> bool:
        return release_id in self._echo.resident

    async def stage(self, release: Release, folder: Path) -> None:
        await self._meet("stage")
        await self._echo.stage(release, folder)

    async def commit(self, release_id: str) -> None:
        await self._meet("commit")
        await self._echo.commit(release_id)
        self.release_id = release_id

    async def forget(self, release_id: str) -> None:
        if self.is_dead:
            raise EngineError("dead")
        await self._echo.unload(release_id)

    async def generate(self, generation: Generation) -> AsyncGenerator[Step, None]:
        await self._meet("generate")
        async for step in self._echo.generate(self.release_id, generation):
            if self.is_dead:
                raise EngineError("died")
            yield step

    async def end(self) -> None:
        self.is_dead = True

    async def _meet(self, phase: str) -> None:
        if self._stub.dies_in == phase:
            self._stub.dies_in = None
            self.is_dead = True
        if self.is_dead:
            raise EngineError("dead")
        if self._stub.hangs_in == phase:
            self._stub.hangs_in = None
            await asyncio.Event().wait()
