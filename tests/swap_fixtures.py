"""A swapper on the echo engine, with two releases."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from serving.admission import Admission
from serving.engine import Generation
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapResult
from serving.weights import release_store
from serving.weights.release import Release
from tests.echo_engine import EchoEngine, EnginePhase
from tests.serving_fixtures import echo_release

BOTH = pytest.mark.parametrize("holds_two", [True, False], ids=["holds two", "in place"])
IN_PLACE = pytest.mark.parametrize("holds_two", [False], ids=["in place"])


class House:
    """A swapper with what it needs, and two releases, the first of which is live."""

    def __init__(self, pipeline_dir: Path, *, holds_two: bool = True) -> None:
        self.pipeline_dir = pipeline_dir
        self.engine = EchoEngine(holds_two=holds_two)
        self.admission = Admission(100, "answers")
        self.swapper = Swapper(
            engine=self.engine,
            admission=self.admission,
            settings=ServingSettings(drain_seconds=0.2, phase_seconds=1, barrier_seconds=0.4),
            pipeline_dir=pipeline_dir,
            pipeline="answers",
            metrics=Metrics("answers"),
        )
        self.old = echo_release(pipeline_dir, 1)
        self.new = echo_release(pipeline_dir, 2)

    async def start(self) -> None:
        release_store.set_current(self.pipeline_dir, self.old.id)
        await self.swapper.start()
        assert self.admission.live is not None and self.admission.live.id == self.old.id

    def release(self, seed: int) -> Release:
        return echo_release(self.pipeline_dir, seed)

    async def swap_held_at(
        self, phase: EnginePhase, release_id: str
    ) -> tuple[asyncio.Task[SwapResult], asyncio.Event]:
        """A swap that has reached this phase of the engine. It goes on when the event is set."""
        gate = self.engine.hang[phase] = asyncio.Event()
        swap = asyncio.create_task(self.swapper.swap(release_id))
        await until(lambda: (phase, release_id) in self.engine.log)
        return swap, gate

    async def answers(self) -> str:
        """The release that a whole request was answered by, under its weights."""
        live = await asyncio.wait_for(self.admission.enter(), 1)
        try:
            generation = Generation(prompt=(1,), max_tokens=2, temperature=0.0)
            steps = [step async for step in self.engine.generate(live.id, generation)]
            assert steps[-1].finish_reason is not None
            return live.id
        finally:
            self.admission.leave(live)

    async def check_old_goes_on(self) -> None:
        assert self.admission.open.is_set()
        self.engine.hang.clear()
        self.engine.fail.clear()
        await asyncio.sleep(0)
        assert await self.answers() == self.old.id
        assert release_store.served_release(self.pipeline_dir) == self.pipeline_dir / self.old.id
        await until(lambda: self.engine.resident == {self.old.id})
        # And nothing stands in the way of the next swap.
        third = self.release(33)
        assert (await self.swapper.swap(third.id)).result == "live"
        assert await self.answers() == third.id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


@pytest.fixture
def holds_two() -> bool:
    """Of the engine of `house`."""
    return True


@pytest.fixture
async def house(tmp_path: Path, holds_two: bool) -> AsyncIterator[House]:
    house = House(tmp_path / "answers", holds_two=holds_two)
    await house.start()
    yield house
    await house.swapper.close()


def flip_a_bit(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / "release.json").write_text("{}")


def lose_a_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()
