"""What a server says of itself: `/live`, that it works, and `/health`, that requests may come."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipeline.stack.services import http_probe
from serving.engine import EngineError
from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine import engine as torch_engine
from serving.engines.torch_engine.engine import TorchEngine
from serving.weights.release_store import set_current
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_app, echo_release, running
from tests.torch_engine_fixtures import ask, build, engine_with, greedy, llama_config, publish


def test_a_server_whose_engine_is_gone_is_neither_alive_nor_ready(tmp_path: Path) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    engine = EchoEngine()
    with running(echo_app(tmp_path, engine)) as url:
        assert [httpx.get(f"{url}/{path}").status_code for path in ("live", "health")] == [200, 200]
        engine.fail["turn"] = EngineError("out of order")
        for path in ("live", "health"):
            answer = httpx.get(f"{url}/{path}")
            assert (answer.status_code, answer.json()["reason"]) == (503, "out of order")


def test_up_is_told_that_a_server_works_and_that_its_engine_is_gone(tmp_path: Path) -> None:
    engine = EchoEngine()
    with running(echo_app(tmp_path, engine)) as url:
        probe = http_probe(url)
        assert probe(10) == "works"
        engine.fail["turn"] = EngineError("out of order")
        assert probe(10) == "dead"
    assert probe(10) == "silent"


def test_a_server_whose_engine_hangs_does_not_say_that_it_is_alive(tmp_path: Path) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    engine, turn = EchoEngine(), asyncio.Event()
    app = echo_app(tmp_path, engine)

    @app.get("/go-on")
    async def go_on() -> None:
        turn.set()

    with running(app) as url:
        engine.hang["turn"] = turn
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(f"{url}/live", timeout=0.3)
        assert httpx.get(f"{url}/health").status_code == 200
        httpx.get(f"{url}/go-on")


async def test_the_thread_that_died_is_told(tmp_path: Path) -> None:
    class Breaks:
        @property
        def is_held(self) -> bool:
            raise RuntimeError("the thread is to die")

    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=64 << 20))
    published = publish(build(llama_config()), tmp_path)
    await engine.take_turn()
    assert engine.failure is None
    await engine.stage(published.release, published.folder)
    await engine.commit(published.id)
    engine._steps._busy_lock = Breaks()  # type: ignore[assignment]
    with pytest.raises(EngineError, match="thread died"):
        await ask(engine, published.id, greedy((1, 2, 3)))
    assert "the thread is to die" in str(engine.failure)
    with pytest.raises(EngineError, match="thread died"):
        await engine.take_turn()
    await engine.close()


@pytest.mark.parametrize("computes", [True, False])
async def test_a_long_step_is_alive_as_long_as_it_computes(
    computes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_engine, "_LONG_STEP_SECONDS", 0.2)
    published = publish(build(llama_config()), tmp_path)
    begun, end = threading.Event(), threading.Event()

    def step(**_: Any) -> list[Any]:
        begun.set()
        while computes and not end.is_set():
            sum(range(1000))
        end.wait()
        raise RuntimeError("the step is over")

    async with engine_with(published) as engine:
        engine._steps._schedulers[published.id].step = step  # type: ignore[method-assign]
        asked = asyncio.create_task(ask(engine, published.id, greedy((1, 2, 3))))
        await asyncio.to_thread(begun.wait)
        turn = asyncio.create_task(engine.take_turn())
        try:
            await asyncio.wait({turn}, timeout=None if computes else 0.5)
            assert turn.done() is computes
        finally:
            end.set()
        await turn
        with pytest.raises(EngineError, match="the step is over"):
            await asked
