"""The thread that computes: what it reports, how many cores it takes, and what it leaves to other
threads."""

import asyncio
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.engines.torch_engine import engine as engine_module
from serving.engines.torch_engine import llama
from serving.engines.torch_engine.engine import StepLoop
from serving.engines.torch_engine.slots import Batch
from serving.engines.torch_engine.staging import Loader
from tests.torch_engine_fixtures import (
    Published,
    ask,
    build,
    engine_with,
    greedy,
    llama_config,
    prompt,
    publish,
    until,
)


class Steps:
    """A scheduler with so many steps to compute, all of which fail or none."""

    def __init__(self, number: int, *, fails: bool) -> None:
        self._left = number
        self._fails = fails

    @property
    def is_idle(self) -> bool:
        return not self._left

    def step(self, *, num_schedulers: int) -> list[Any]:
        self._left -= 1
        if self._fails:
            raise RuntimeError("an illegal memory access was encountered")
        return []

    def fail(self, error: Exception) -> list[Any]:
        return []


@pytest.mark.parametrize("is_one_too_few", [False, True])
async def test_steps_that_fail_again_and_again_are_a_failure(is_one_too_few: bool) -> None:
    count = engine_module._MAX_FAILED_STEPS - is_one_too_few
    loop = StepLoop(num_threads=1, busy_lock_file=None)
    try:
        failing: Any = Steps(count, fails=True)
        loop.add("failing", failing)
        loop.next_turn()
        await until(lambda: loop._num_failed_steps == count)
        assert loop.failure == (
            None if is_one_too_few else f"the last {count} steps failed; the log has the errors"
        )
        # The thread goes on, and so does another release.
        good: Any = Steps(1, fails=False)
        loop.add("good", good)
        loop.next_turn()
        await until(lambda: loop._num_failed_steps == 0)
        assert loop.failure is None
    finally:
        await asyncio.to_thread(loop.close)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(build(llama_config()), tmp_path_factory.mktemp("home"))


@pytest.fixture
def at_work(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of threads of each step."""
    found: list[int] = []
    forward = llama.LlamaRunner.forward

    def counted(runner: llama.LlamaRunner, batch: Batch) -> torch.Tensor:
        found.append(torch.get_num_threads())
        return forward(runner, batch)

    monkeypatch.setattr(llama.LlamaRunner, "forward", counted)
    return found


def test_staging_on_one_core_leaves_the_steps_all_of_them(
    published: Published, at_work: list[int]
) -> None:

    async def scenario() -> None:
        async with engine_with(published, num_threads=None) as engine:
            await ask(engine, published.id, greedy(prompt(5), 3))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):  # the second engine begins after the first one has staged
            asyncio.run(scenario())
        assert set(at_work) == {2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


async def test_while_a_release_is_staged_the_steps_leave_it_a_core(
    published: Published, at_work: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = publish(build(llama_config(), seed=1), tmp_path)
    load = engine_module.load_runner

    def load_late(loader: Loader) -> Any:
        while loader.release.id == other.id and at_work[-1] != 1:
            time.sleep(0.001)
        return load(loader)

    monkeypatch.setattr(engine_module, "load_runner", load_late)
    async with engine_with(published, num_threads=2) as engine:
        running = engine.generate(published.id, greedy(prompt(5), max_tokens=120))
        await anext(running)
        assert at_work[-1] == 2
        staging = asyncio.create_task(engine.stage(other.release, other.folder))
        async for _ in running:
            if staging.done():
                break
        await staging
        await ask(engine, published.id, greedy(prompt(5), max_tokens=2))
        assert at_work[-1] == 2


@contextmanager
def computing(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


async def test_beside_others_that_compute_the_steps_leave_them_a_core(
    published: Published, at_work: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "_LOCK_CHECK_SECONDS", 0.0)
    lock = tmp_path / "computing"

    async def threads_of(engine: Any) -> set[int]:
        at_work.clear()
        await ask(engine, published.id, greedy(prompt(5), 3))
        return set(at_work)

    async with engine_with(published, num_threads=2, busy_lock_file=lock) as engine:
        assert await threads_of(engine) == {2}
        with computing(lock), computing(lock):
            assert await threads_of(engine) == {1}
        assert await threads_of(engine) == {2}
