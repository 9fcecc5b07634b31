"""The thread that computes: what it reports, and what it leaves to other threads."""

import asyncio
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from serving.engines.torch_engine import engine as engine_module
from serving.engines.torch_engine.engine import StepLoop
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

    monkeypatch.setattr(engine_module, "_deliver", deliver)
    loop = StepLoop(num_threads=1, busy_lock_file=None)
    schedulers: list[Any] = [Named("old"), Named("new")]
    loop._call(lambda: loop._schedulers.update({each.name: each for each in schedulers}))
    try:
        loop.next_turn().result(30)
        loop.next_turn().result(30)
    finally:
        loop.stop()
        loop.join()
    assert delivered == ["step of old", "events of old", "step of new", "events of new"]


@pytest.mark.parametrize("is_one_too_few", [False, True])
def test_steps_that_fail_again_and_again_are_a_failure(is_one_too_few: bool) -> None:
    count = engine_module._MAX_FAILED_STEPS - is_one_too_few

    async def story() -> None:
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
            for each in (runner, *runner.slots):
                weakref.finalize(each, lambda: freed_on.append(threading.current_thread().name))
            del runner, each
            await ask(engine, first.id, greedy(prompt(5)))
            await engine.unload(first.id)
            await until(lambda: first.id not in engine.residents)
            assert freed_on == ["torch-engine-staging_0"] * 3

    asyncio.run(story())
