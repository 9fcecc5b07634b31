"""Whatever becomes of vLLM in a swap, the release that was live answers again. vLLM is a stub here,
which starts more slowly than a barrier may be shut."""

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.admission import Admission
from serving.engine import EngineError, Generation
from serving.engines import vllm_engine
from serving.engines.vllm_engine import VllmEngine
from serving.engines.vllm_settings import VllmEngineSettings
from serving.errors import ReleaseError
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_schemas import SwapResult
from serving.weights import release_store
from serving.weights.release import Release
from serving.weights.release_store import set_current
from serving.weights.verify import verify_shards
from tests.contract.engine_bench import swap
from tests.serving_fixtures import echo_app, echo_release, running
from tests.vllm_stub import StubbedVllm

HANG_SECONDS = 0.5
"""The longest that a swap may hold its barrier, where vLLM hangs behind it."""
START_SECONDS = 0.6
MOST_START_SECONDS = 1.5


class House:
    """A swapper over the vLLM engine; the first of two releases is live."""

    def __init__(self, pipeline_dir: Path, way: str, barrier_seconds: float) -> None:
        self.pipeline_dir = pipeline_dir
        self.vllm = StubbedVllm(way=way)
        self.vllm.start_seconds = START_SECONDS
        settings = VllmEngineSettings(start_seconds=MOST_START_SECONDS)
        self.engine = VllmEngine(settings, self.vllm.start)
        self.admission = Admission(100, "answers")
        self.swapper = Swapper(
            engine=self.engine,
            admission=self.admission,
            settings=ServingSettings(
                drain_seconds=5, phase_seconds=5, barrier_seconds=barrier_seconds
            ),
            releases_dir=pipeline_dir,
            pipeline="answers",
            metrics=Metrics("answers"),
        )
        self.old, self.new = (echo_release(pipeline_dir, seed) for seed in (1, 2))

    async def swap(self, release: Release) -> SwapResult:
        async with asyncio.timeout(5):
            return await self.swapper.swap(release.id)

    async def answers(self) -> str:
        """The release that one request is answered by; it waits for vLLM as long as that takes."""
        live = await self.admission.enter()
        try:
            generation = Generation(prompt=(1,), max_tokens=2, temperature=0.0)
            async with asyncio.timeout(5):
                steps = [step async for step in self.engine.generate(live.id, generation)]
            assert steps[-1].finish_reason is not None
            return live.id
        finally:
            self.admission.leave(live)

    async def check_old_goes_on(self) -> None:
        assert not self.admission.is_closed
        assert await self.answers() == self.old.id
        again = await self.swap(self.old)
        assert (again.result, again.previous) == ("live", self.old.id)
        assert await self.answers() == self.old.id
        # And nothing stands in the way of the next swap.
        assert (await self.swap(self.new)).result == "live"
        assert await self.answers() == self.new.id


def play(
    pipeline_dir: Path,
    way: str,
    story: Callable[[House], Awaitable[None]],
    *,
    barrier_seconds: float = 5,
) -> None:
    async def whole() -> None:
        house = House(pipeline_dir, way, barrier_seconds)
        release_store.set_current(pipeline_dir, house.old.id)
        await house.swapper.start()
        try:
            await story(house)
        finally:
            await house.swapper.close()
            await house.engine.close()

    asyncio.run(whole())


TOLD = {"stage": "stage", "commit": "commit", "generate": "probe"}
"""By what the process is told to do, the phase of the swap."""


@pytest.mark.parametrize("way", ["copy", "reload"])
@pytest.mark.parametrize("told", TOLD)
def test_a_vllm_that_dies_in_a_swap_answers_again(tmp_path: Path, way: str, told: str) -> None:
    async def story(house: House) -> None:
        house.vllm.dies_in = told
        result = await house.swap(house.new)
        assert (result.result, result.phase) == ("failed", TOLD[told])
        await house.check_old_goes_on()

    play(tmp_path, way, story)


@pytest.mark.parametrize("way", ["copy", "reload"])
@pytest.mark.parametrize("told", ["commit", "generate"])
def test_a_vllm_that_hangs_behind_the_barrier_answers_again(
    tmp_path: Path, way: str, told: str
) -> None:
    async def story(house: House) -> None:
        house.vllm.hangs_in = told
        result = await house.swap(house.new)
        assert (result.result, result.phase) == ("failed", TOLD[told])
        assert f"took more than {HANG_SECONDS} s" in result.reasons[0]
        await house.check_old_goes_on()

    play(tmp_path, way, story, barrier_seconds=HANG_SECONDS)


@pytest.mark.parametrize("way", ["copy", "reload"])
def test_a_refused_probe_leaves_the_old_release(tmp_path: Path, way: str) -> None:
    async def story(house: House) -> None:
        wrong = echo_release(house.pipeline_dir, 3, probe_shift=0.01)
        result = await house.swap(wrong)
        assert (result.result, result.phase) == ("refused", "probe")
        await house.check_old_goes_on()
        # vLLM's own reload has no way back but a start.
        assert house.vllm.started[house.old.id] == (2 if way == "reload" else 1)

    play(tmp_path, way, story)


def test_no_request_waits_at_the_barrier_for_a_start(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.vllm.dies_in = "generate"
        started = asyncio.get_running_loop().time()
        assert (await house.swap(house.new)).result == "failed"
        assert asyncio.get_running_loop().time() - started < START_SECONDS
        assert await house.answers() == house.old.id
        assert asyncio.get_running_loop().time() - started > START_SECONDS

    play(tmp_path, "copy", story)


def test_a_vllm_that_gave_up_is_started_again_for_who_asks(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.vllm.start_seconds = 0.0
        house.vllm.fails_starts = 3
        house.vllm.dies_in = "generate"
        with pytest.raises(EngineError, match="dead"):
            await house.answers()
        with pytest.raises(EngineError, match="does not start again"):
            await house.answers()
        assert await house.answers() == house.old.id

    play(tmp_path, "copy", story)


def test_a_start_that_hangs_is_given_up_for_the_next(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        house.vllm.start_seconds = 0.0
        house.vllm.hangs_starts = 1
        house.vllm.dies_in = "generate"
        with pytest.raises(EngineError, match="dead"):
            await house.answers()
        assert await house.answers() == house.old.id
        assert house.vllm.started[house.old.id] == 3

    play(tmp_path, "copy", story)


def test_a_disk_that_hangs_before_a_start_is_given_up_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_back = threading.Event()
    calls = []

    def verify_once_it_is_back(folder: Path, release: Release) -> tuple[str, ...]:
        calls.append(folder)
        if len(calls) == 1:
            is_back.wait()
        return verify_shards(folder, release)

    async def story(house: House) -> None:
        monkeypatch.setattr(vllm_engine, "verify_shards", verify_once_it_is_back)
        house.vllm.dies_in = "generate"
        try:
            with pytest.raises(EngineError, match="dead"):
                await house.answers()
            assert await house.answers() == house.old.id
        finally:
            is_back.set()
        assert len(calls) == 2

    play(tmp_path, "copy", story)


@pytest.mark.parametrize("error", [OSError("too many open files"), ReleaseError("truncated")])
def test_a_shard_that_cannot_be_read_once_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    errors = [error]

    def verify_or_fail(folder: Path, release: Release) -> tuple[str, ...]:
        if errors:
            raise errors.pop()
        return verify_shards(folder, release)

    async def story(house: House) -> None:
        monkeypatch.setattr(vllm_engine, "verify_shards", verify_or_fail)
        house.vllm.dies_in = "generate"
        with pytest.raises(EngineError, match="dead"):
            await house.answers()
        assert await house.answers() == house.old.id
        assert errors == []

    play(tmp_path, "copy", story)


def test_a_vllm_that_dies_between_swaps_comes_back_on_what_is_live(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        assert (await house.swap(house.new)).result == "live"
        house.vllm.dies_in = "generate"
        with pytest.raises(EngineError, match="dead"):
            await house.answers()
        assert await house.answers() == house.new.id
        assert house.vllm.started == {house.old.id: 1, house.new.id: 1}

    play(tmp_path, "copy", story)


def test_a_vllm_that_dies_while_it_stages_fails_who_is_answered_and_lets_the_next_wait(
    tmp_path: Path,
) -> None:
    old, new = (echo_release(tmp_path, seed) for seed in (1, 2))
    set_current(tmp_path, old.id)
    vllm = StubbedVllm(step_seconds=0.1)
    vllm.start_seconds = START_SECONDS
    engine = VllmEngine(VllmEngineSettings(), vllm.start)
    body = {"prompt": "Hi", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
    with (
        running(echo_app(tmp_path, engine)) as url,
        httpx.Client(base_url=url, timeout=30) as http,
        ThreadPoolExecutor(2) as pool,
        ExitStack() as open_streams,
    ):
        before = http.post("/v1/completions", json={**body, "max_tokens": 3}).json()["choices"]

        def ask(**change: Any) -> httpx.Response:
            return http.post("/v1/completions", json={**body, **change})

        process = vllm.process
        assert process is not None
        under_way = [pool.submit(ask) for _ in range(2)]
        streams = []
        for _ in range(2):
            asking = http.stream("POST", "/v1/completions", json={**body, "stream": True})
            streams.append(open_streams.enter_context(asking).iter_lines())
            assert next(streams[-1]).startswith("data: ")
        while process.num_running < 4:
            time.sleep(0.01)
        vllm.dies_in = "stage"
        result = swap(http, new.id).json()
        assert (result["result"], result["phase"]) == ("failed", "stage")
        assert process.is_dead
        assert vllm.process is process  # none has come in its place yet
        late = ask(max_tokens=3)

        assert [answer.result().status_code for answer in under_way] == [503, 503]
        for lines in streams:
            # It said 200 with its first token.
            *_, error, done = (line for line in lines if line)
            assert json.loads(error.removeprefix("data: "))["error"]["code"] == "unavailable"
            assert done == "data: [DONE]"
        assert late.status_code == 200, late.text
        assert late.json()["system_fingerprint"] == old.id
        assert late.json()["choices"] == before
        assert vllm.started == {old.id: 2}
        assert swap(http, new.id).json()["result"] == "live"
