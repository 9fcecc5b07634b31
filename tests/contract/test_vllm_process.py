"""What ends a start or a swap of vLLM before it goes wrong. Nothing starts: vLLM's own object is
made up."""

import asyncio
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from serving.engine import EngineError, StageError
from serving.engines import vllm_process
from serving.engines.vllm_engine import VllmEngine
from serving.engines.vllm_process import VllmProcess
from serving.engines.vllm_settings import VllmEngineSettings
from tests.serving_fixtures import echo_release

pytestmark = pytest.mark.vllm


class MadeUpLlm:
    """Answers for one worker."""

    errored = False

    def __init__(self) -> None:
        self.reason: str | None = None
        self.needed_bytes = 0
        self.hangs_in: str | None = None
        self.dies_in: str | None = None
        self.status: dict[str, Any] = {}
        self.asked: list[str] = []
        self.is_shut_down = False
        self.may_shut_down = threading.Event()
        self.may_shut_down.set()

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.asked.append(method)
        if method == self.dies_in:
            self.errored = True
            raise RuntimeError("EngineCore died")
        if method == self.hangs_in or self.errored:
            await asyncio.Event().wait()
        way = "copy" if self.reason is None else "reload"
        answers = {
            "hotpush_prepare": {"pid": 0, "way": way, "reason": self.reason},
            "hotpush_needed_bytes": self.needed_bytes,
            "hotpush_status": {
                "is_done": True, "refusals": (), "error": None, "read_bytes": 0, "seconds": 0.0,
                **self.status,
            },
        }  # fmt: skip
        return [answers.get(method)]

    async def update_weight_version(self, version: str) -> None: ...

    def shutdown(self) -> None:
        self.may_shut_down.wait()
        self.is_shut_down = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> MadeUpLlm:
    made_up = MadeUpLlm()
    monkeypatch.setattr(vllm_process, "_start", lambda folder, settings: made_up)
    return made_up


def engine_over(**settings: Any) -> VllmEngine:
    return VllmEngine(VllmEngineSettings(**settings), VllmProcess.start)


def test_workers_that_hang_when_made_ready_are_given_up(llm: MadeUpLlm, tmp_path: Path) -> None:
    llm.hangs_in = "hotpush_prepare"
    release = echo_release(tmp_path, 1)
    with pytest.raises(StageError, match=r"did not start on r000001-\w+ in 0\.5 s"):
        asyncio.run(engine_over(start_seconds=0.5).stage(release, tmp_path / release.id))
    assert llm.asked == ["hotpush_prepare"]
    assert llm.is_shut_down


def test_a_start_that_hangs_is_given_up_and_shut_down_when_it_is_over(
    llm: MadeUpLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()

    def start(folder: Path, settings: VllmEngineSettings) -> MadeUpLlm:
        may_start.wait()
        return llm

    async def story() -> None:
        with pytest.raises(StageError, match="did not start"):
            await engine_over(start_seconds=0.5).stage(release, tmp_path / release.id)
        assert not llm.is_shut_down
        may_start.set()
        while not llm.is_shut_down:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(vllm_process, "_start", start)
    release = echo_release(tmp_path, 1)
    try:
        asyncio.run(story())
    finally:
        may_start.set()


def test_a_vllm_that_does_not_shut_down_is_left_behind(
    llm: MadeUpLlm,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def story() -> float:
        engine = engine_over()
        await engine.stage(release, tmp_path / release.id)
        llm.may_shut_down.clear()
        started = time.monotonic()
        await engine.close()
        return time.monotonic() - started

    monkeypatch.setattr(vllm_process, "_END_SECONDS", 0.2)
    release = echo_release(tmp_path, 1)
    try:
        assert 0.2 <= asyncio.run(story()) < 5
        assert not llm.is_shut_down
    finally:
        llm.may_shut_down.set()
    assert "did not shut down in 0.2 s" in caplog.text


def test_why_swaps_take_the_slower_way_is_logged(
    llm: MadeUpLlm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> str:
        engine = engine_over()
        await engine.stage(release, tmp_path / release.id)
        assert engine.process is not None
        way = engine.process.way
        await engine.close()
        return way

    llm.reason = "RuntimeError: no such kernel"
    release = echo_release(tmp_path, 1)
    with caplog.at_level(logging.WARNING):
        assert asyncio.run(story()) == "reload"
    assert "slower way: RuntimeError: no such kernel" in caplog.text


async def stage_a_second_release(pipeline_dir: Path) -> None:
    first, second = (echo_release(pipeline_dir, seed) for seed in (1, 2))
    engine = engine_over()
    await engine.stage(first, pipeline_dir / first.id)
    await engine.commit(first.id)
    try:
        await engine.stage(second, pipeline_dir / second.id)
    finally:
        await engine.close()


@pytest.mark.parametrize("free", [999, 1000, None])
def test_too_little_memory_is_found_before_anything_is_read(
    llm: MadeUpLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int | None
) -> None:
    llm.needed_bytes = 1000
    monkeypatch.setattr(vllm_process, "free_bytes", lambda device: free)
    if free == 999:
        with pytest.raises(StageError, match="needs 1000 bytes to be staged, 999 are free"):
            asyncio.run(stage_a_second_release(tmp_path))
        assert "hotpush_stage" not in llm.asked
    else:
        asyncio.run(stage_a_second_release(tmp_path))
        assert "hotpush_stage" in llm.asked


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ({"refusals": ("a.safetensors: tensor a: holds NaN",)}, "holds NaN"),
        ({"error": "RuntimeError: no memory to pin"}, "no memory to pin"),
    ],
)
def test_what_one_worker_cannot_stage_no_worker_keeps(
    llm: MadeUpLlm, tmp_path: Path, status: dict[str, Any], reason: str
) -> None:
    llm.status = status
    with pytest.raises((StageError, EngineError), match=reason):
        asyncio.run(stage_a_second_release(tmp_path))
    assert llm.asked[-1] == "hotpush_forget"


def test_a_vllm_that_died_is_asked_nothing_more(llm: MadeUpLlm, tmp_path: Path) -> None:
    first, second = (echo_release(tmp_path, seed) for seed in (1, 2))

    async def story() -> None:
        process = await VllmProcess.start(first, tmp_path / first.id, VllmEngineSettings())
        llm.dies_in = "hotpush_status"
        async with asyncio.timeout(10):
            await process.stage(second, tmp_path / second.id)

    with pytest.raises(EngineError, match="EngineCore died"):
        asyncio.run(story())
