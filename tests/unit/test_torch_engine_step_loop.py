"""The thread that computes: what it reports, and what it leaves to other threads."""

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.engines.torch_engine import device as device_module
from serving.engines.torch_engine import step_loop
from serving.engines.torch_engine.device import BusyLock
from serving.engines.torch_engine.step_loop import StepLoop
from tests.torch_engine_changes import until
from tests.torch_engine_fixtures import (
    ask,
    build,
    engine_with,
    greedy,
    llama_config,
    prompt,
    publish,
)


class Steps:
    """A scheduler with so many steps to compute, all of which fail or none."""

    def __init__(self, number: int, *, fails: bool) -> None:
        self._left = number
        self._fails = fails

    @property
    def is_idle(self) -> bool:
        return not self._left

    def warm_up(self) -> None: ...

    def step(self, *, num_schedulers: int) -> list[Any]:
        self._left -= 1
        if self._fails:
            raise RuntimeError("an illegal memory access was encountered")
        return []

    def fail(self, error: Exception) -> list[Any]:
        return []


def test_the_events_of_one_release_do_not_wait_for_the_step_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    delivered: list[str] = []

    class Named(Steps):
        def __init__(self, name: str) -> None:
            super().__init__(1, fails=False)
            self.name = name

        def step(self, *, num_schedulers: int) -> list[Any]:
            super().step(num_schedulers=num_schedulers)
            delivered.append(f"step of {self.name}")
            return [self.name]

    def deliver(events: list[Any]) -> None:
        delivered.extend(f"events of {name}" for name in events)

    monkeypatch.setattr(step_loop, "_deliver", deliver)
    loop = StepLoop(num_threads=1, busy_lock=BusyLock(None))
    schedulers: list[Any] = [Named("old"), Named("new")]
    with loop._changed:
        loop._schedulers = {each.name: each for each in schedulers}
        loop._changed.notify()
    try:
        loop.next_turn().result(30)
        loop.next_turn().result(30)
    finally:
        loop.stop()
        loop.join()
    assert delivered == ["step of old", "events of old", "step of new", "events of new"]


@pytest.mark.parametrize("is_one_too_few", [False, True])
def test_steps_that_fail_again_and_again_are_a_failure(is_one_too_few: bool) -> None:
    count = step_loop._MAX_FAILED_STEPS - is_one_too_few

    async def story() -> None:
        loop = StepLoop(num_threads=1, busy_lock=BusyLock(None))
        try:
            failing: Any = Steps(count, fails=True)
            loop.add("failing", failing)
            await until(lambda: loop._num_failed_steps == count)
            assert loop.failure == (
                None if is_one_too_few else f"the last {count} steps failed; the log has the errors"
            )
            # The thread goes on, and so does another release.
            good: Any = Steps(1, fails=False)
            loop.add("good", good)
            await until(lambda: loop._num_failed_steps == 0)
            assert loop.failure is None
        finally:
            loop.stop()
            await asyncio.to_thread(loop.join)

    asyncio.run(story())


def test_a_release_is_freed_on_the_thread_that_loads(tmp_path: Path) -> None:
    """Freeing gigabytes takes long, and nobody's step may wait for it."""
    first, second = (publish(build(llama_config(), seed), tmp_path / str(seed)) for seed in (1, 2))
    freed_on: list[str] = []

    async def story() -> None:
        async with engine_with(first, second) as engine:
            runner = engine._steps._schedulers[first.id]._runner
            for each in (runner, runner._slots):  # type: ignore[attr-defined]
                weakref.finalize(each, lambda: freed_on.append(threading.current_thread().name))
            del runner, each
            await ask(engine, first.id, greedy(prompt(5)))
            await engine.unload(first.id)
            await until(lambda: first.id not in engine.resident_releases())
            assert freed_on == ["torch-engine-staging_0"] * 2

    asyncio.run(story())


def test_a_release_that_is_loaded_again_is_not_forgotten_with_the_one_before(
    tmp_path: Path,
) -> None:
    published = publish(build(llama_config()), tmp_path)

    async def story() -> None:
        async with engine_with(published) as engine:
            before = engine._residents[published.id]
            await engine.unload(published.id)
            await until(lambda: not engine.resident_releases())
            await engine.stage(published.release, published.folder)
            engine._forget(before)
            assert list(engine.resident_releases()) == [published.id]

    asyncio.run(story())


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_blocks_that_torch_keeps_of_a_gpu_are_returned(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    emptied: list[bool] = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(True))
    device_module.return_unused_memory(torch.device(kind))
    assert emptied == [True] * (kind == "cuda")
