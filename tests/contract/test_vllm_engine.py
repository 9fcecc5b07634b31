"""What ends a start or a swap of vLLM before it goes wrong. Nothing starts: vLLM's own object is
made up."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from serving.engine import EngineError, Generation
from serving.engines import vllm_engine
from serving.engines.settings import VllmEngineSettings
from serving.engines.vllm_engine import VllmEngine
from serving.errors import ReleaseError
from serving.weights.publish import publish_state_dict
from tests.serving_fixtures import echo_release, save_config, tiny_llama

pytestmark = pytest.mark.vllm


class MadeUpLlm:
    """Answers for one worker."""

    errored = False
    tokenizer = None

    def __init__(self) -> None:
        self.reason: str | None = None
        self.hangs_in: str | None = None
        self.dies_in: str | None = None
        self.status: dict[str, Any] = {"reasons": [], "read_bytes": 0}
        self.asked: list[str] = []
        self.is_shut_down = False

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.asked.append(method)
        if method == self.dies_in:
            self.errored = True
            raise RuntimeError("EngineCore died")
        if method == self.hangs_in or self.errored:
            await asyncio.Event().wait()
        answers = {
            "hotpush_prepare": {"pid": 0, "reason": self.reason},
            "hotpush_status": self.status,
            "hotpush_commit": 0.0,
        }
        return [answers.get(method)]

    async def update_weight_version(self, version: str) -> None: ...

    def shutdown(self) -> None:
        self.is_shut_down = True


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> MadeUpLlm:
    made_up = MadeUpLlm()
    monkeypatch.setattr(vllm_engine, "_new_llm", lambda folder, settings: made_up)
    return made_up


def engine_over(**settings: Any) -> VllmEngine:
    return VllmEngine(VllmEngineSettings(**settings))


async def test_workers_that_hang_when_made_ready_are_given_up(
    llm: MadeUpLlm, tmp_path: Path
) -> None:
    llm.hangs_in = "hotpush_prepare"
    release = echo_release(tmp_path, 1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await engine_over().stage(release, tmp_path / release.id)
    assert llm.asked == ["hotpush_prepare"]
    assert llm.is_shut_down


async def test_a_start_that_hangs_is_given_up_and_shut_down_when_it_is_over(
    llm: MadeUpLlm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_start = threading.Event()

    def start(folder: Path, settings: VllmEngineSettings) -> MadeUpLlm:
        may_start.wait()
        return llm

    monkeypatch.setattr(vllm_engine, "_new_llm", start)
    release = echo_release(tmp_path, 1)
    try:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await engine_over().stage(release, tmp_path / release.id)
        assert not llm.is_shut_down
        may_start.set()
        while not llm.is_shut_down:
            await asyncio.sleep(0.01)
    finally:
        may_start.set()


async def test_why_swaps_take_the_slower_way_is_logged(
    llm: MadeUpLlm, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm.reason = "RuntimeError: no such kernel"
    release = echo_release(tmp_path, 1)
    engine = engine_over()
    with caplog.at_level(logging.WARNING):
        await engine.stage(release, tmp_path / release.id)
    await engine.close()
    assert engine.way == "reload"
    assert "slower way: RuntimeError: no such kernel" in caplog.text


async def swap_to_a_second_release(pipeline_dir: Path) -> VllmEngine:
    first, second = (echo_release(pipeline_dir, seed) for seed in (1, 2))
    engine = engine_over()
    await engine.take_turn()  # nothing runs yet, so nothing hangs
    await engine.stage(first, pipeline_dir / first.id)
    await engine.commit(first.id)
    try:
        async with asyncio.timeout(10):
            await engine.stage(second, pipeline_dir / second.id)
            await engine.commit(second.id)
    finally:
        await engine.close()
    return engine


async def test_what_one_worker_cannot_stage_no_worker_keeps(llm: MadeUpLlm, tmp_path: Path) -> None:
    llm.status = {"reasons": ["a.safetensors: tensor a: holds NaN"]}
    with pytest.raises(ReleaseError, match="holds NaN"):
        await swap_to_a_second_release(tmp_path)
    assert llm.asked[-1] == "hotpush_forget"


async def test_a_vllm_that_died_is_asked_nothing_more(llm: MadeUpLlm, tmp_path: Path) -> None:
    llm.dies_in = "hotpush_status"
    with pytest.raises(EngineError, match="EngineCore died"):
        await swap_to_a_second_release(tmp_path)


async def test_after_a_commit_that_does_not_end_the_engine_is_dead(
    llm: MadeUpLlm, tmp_path: Path
) -> None:
    first, second = (echo_release(tmp_path, seed) for seed in (1, 2))
    engine = engine_over()
    for release in (first, second):
        await engine.stage(release, tmp_path / release.id)
    llm.hangs_in = "hotpush_commit"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.commit(second.id)
    for call in (engine.commit(first.id), engine.take_turn()):
        with pytest.raises(EngineError, match="may be mixed"):
            await call
    await engine.close()


async def test_a_vllm_that_dies_in_a_swap_is_not_forgotten(llm: MadeUpLlm, tmp_path: Path) -> None:
    first, second = (echo_release(tmp_path, seed) for seed in (1, 2))
    engine = engine_over()
    for release in (first, second):
        await engine.stage(release, tmp_path / release.id)
        await engine.commit(release.id)
    llm.errored = True
    with pytest.raises(EngineError):
        await engine.commit(first.id)
    await engine.unload(second.id)
    assert engine.failure == "vLLM died"
    with pytest.raises(EngineError, match="vLLM died"):
        await engine.take_turn()


async def test_parameters_that_vllm_refuses_are_an_error_of_the_engine(
    llm: MadeUpLlm, tmp_path: Path
) -> None:
    release = echo_release(tmp_path, 1)
    engine = engine_over()
    await engine.stage(release, tmp_path / release.id)
    asked = Generation(prompt=(1,), max_tokens=1, temperature=-1.0)
    with pytest.raises(EngineError, match="vLLM refuses the request: temperature"):
        await anext(engine.generate(release.id, asked))


def test_every_seed_is_a_seed() -> None:
    seeds = (-2, -1, 0)
    asked = [Generation(prompt=(1,), max_tokens=1, seed=seed) for seed in seeds]
    found = {vllm_engine._sampling_params(each, None).seed for each in asked}
    assert len(found - {None}) == len(seeds)


async def test_a_vllm_that_hangs_takes_no_turn(llm: MadeUpLlm, tmp_path: Path) -> None:
    release = echo_release(tmp_path, 1)
    engine = engine_over()
    await engine.stage(release, tmp_path / release.id)
    await engine.take_turn()
    llm.hangs_in = "hotpush_take_turn"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await engine.take_turn()
    await engine.close()


async def test_vllm_keeps_the_dtype_of_the_first_release_that_it_starts_on(
    llm: MadeUpLlm, tmp_path: Path
) -> None:
    network = tiny_llama(tied=False)
    files_dir = save_config(network, tmp_path / "files")
    small, exact = (
        publish_state_dict(
            tmp_path / "releases",
            {name: tensor.to(dtype) for name, tensor in network.state_dict().items()},
            files_dir=files_dir,
        )
        for dtype in (torch.bfloat16, torch.float32)
    )
    engine = engine_over()
    llm.dies_in = "hotpush_prepare"
    with pytest.raises(EngineError):
        await engine.stage(small, tmp_path / "releases" / small.id)
    assert engine.dtype_of(exact) == "float32", "vLLM did not start on the other one"
    llm.dies_in, llm.errored = None, False
    await engine.stage(exact, tmp_path / "releases" / exact.id)
    assert engine.dtype_of(small) == "float32", "a swap does not change it"
    await engine.close()
