"""How many cores the steps take: all, but what staging or somebody else needs."""

import asyncio
import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from serving.engines.torch_engine import engine as engine_module
from serving.engines.torch_engine import llama
from serving.engines.torch_engine.engine import BusyLock
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
)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return publish(build(llama_config()), tmp_path_factory.mktemp("home"))


def test_staging_on_one_core_leaves_the_steps_all_of_them(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: set[int] = set()
    forward = llama.LlamaRunner.forward

    def counted(runner: llama.LlamaRunner, batch: Batch) -> torch.Tensor:
        at_work.add(torch.get_num_threads())
        return forward(runner, batch)

    monkeypatch.setattr(llama.LlamaRunner, "forward", counted)

    async def scenario() -> None:
        async with engine_with(published, num_threads=None) as engine:
            await ask(engine, published.id, greedy(prompt(5), 3))

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for _ in range(2):  # the second engine begins after the first one has staged
            asyncio.run(scenario())
        assert at_work == {2}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_while_a_release_is_staged_the_steps_leave_it_a_core(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = publish(build(llama_config(), seed=1), tmp_path)
    at_work: list[int] = []
    has_lent = threading.Event()
    forward, load = llama.LlamaRunner.forward, engine_module.load_runner

    def counted(runner: llama.LlamaRunner, batch: Batch) -> torch.Tensor:
        at_work.append(torch.get_num_threads())
        if at_work[-1] == 1:
            has_lent.set()
        return forward(runner, batch)

    def load_late(loader: Loader, *arguments: Any) -> Any:
        if loader.release.id == other.id:
            assert has_lent.wait(10)
        return load(loader, *arguments)

    monkeypatch.setattr(llama.LlamaRunner, "forward", counted)
    monkeypatch.setattr(engine_module, "load_runner", load_late)

    async def scenario() -> None:
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

    asyncio.run(scenario())


@contextmanager
def computing(lock: Path) -> Iterator[None]:
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def test_beside_others_that_compute_the_steps_leave_them_a_core(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work: list[int] = []
    forward = llama.LlamaRunner.forward

    def counted(runner: llama.LlamaRunner, batch: Batch) -> torch.Tensor:
        at_work.append(torch.get_num_threads())
        return forward(runner, batch)

    monkeypatch.setattr(llama.LlamaRunner, "forward", counted)
    monkeypatch.setattr(engine_module, "_LOCK_CHECK_SECONDS", 0.0)
    lock = tmp_path / "computing"

    async def threads_of(engine: Any) -> set[int]:
        at_work.clear()
        await ask(engine, published.id, greedy(prompt(5), 3))
        return set(at_work)

    async def scenario() -> None:
        async with engine_with(published, num_threads=2, busy_lock_file=lock) as engine:
            assert await threads_of(engine) == {2}
            with computing(lock), computing(lock):
                assert await threads_of(engine) == {1}
            assert await threads_of(engine) == {2}

    asyncio.run(scenario())


def test_the_busy_lock_is_checked_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(engine_module.time, "monotonic", lambda: now[0])
    lock = tmp_path / "computing"
    found = BusyLock(lock)
    assert not found.is_held
    with computing(lock):
        assert not found.is_held
        now[0] += 0.11
        assert found.is_held
    assert found.is_held
    now[0] += 0.11
    assert not found.is_held
    assert not BusyLock(None).is_held
