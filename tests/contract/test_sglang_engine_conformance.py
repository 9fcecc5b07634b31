"""The SGLang adapter keeps what every engine must, in front of a stand-in for the upstream."""

import asyncio
import json
import re
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.engine import EngineError, Generation, StageError
from serving.engines.sglang_engine import SglangEngine
from serving.weights.release import Release
from serving.weights.release_store import set_current
from tests.contract.engine_bench import EngineBench, swap
from tests.contract.engine_conformance import EngineConformance
from tests.serving_fixtures import echo_app, echo_release, running
from tests.sglang_stand_in import SglangStandIn


@pytest.fixture
def releases(tmp_path: Path) -> tuple[Release, Release]:
    return echo_release(tmp_path, 1), echo_release(tmp_path, 2, max_shard_bytes=70)


class TestSglangEngine(EngineConformance):
    @pytest.fixture(params=["whole", pytest.param("differences", marks=pytest.mark.slow)])
    def bench(
        self,
        request: pytest.FixtureRequest,
        tmp_path: Path,
        releases: tuple[Release, Release],
    ) -> Iterator[EngineBench]:
        first, second = releases
        stand_in = SglangStandIn(
            tmp_path / first.id, streams_differences=request.param == "differences"
        )
        with running(stand_in.app) as url:
            yield EngineBench(
                make_engine=lambda: SglangEngine(url),
                pipeline_dir=tmp_path,
                first=first,
                second=second,
                prompts=("Hello", "What is new?", "Grüße"),
            )
        assert all(update["flush_cache"] for update in stand_in.updates)
        assert not any(update["abort_all_requests"] for update in stand_in.updates)


@pytest.fixture
def stand_in(tmp_path: Path, releases: tuple[Release, Release]) -> SglangStandIn:
    return SglangStandIn(tmp_path / releases[0].id)


def test_a_refused_update_leaves_the_old_release(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, second = releases
    set_current(tmp_path, first.id)
    with (
        running(stand_in.app) as upstream,
        running(echo_app(tmp_path, SglangEngine(upstream))) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        http.get("/health").raise_for_status()  # the port listens before the first one is live
        stand_in.ignores_updates = True
        result = swap(http, second.id).json()
        assert result["result"] == "failed"
        assert f"says that it runs '{first.id}'" in result["reasons"][0]
        stand_in.ignores_updates = False
        body = {"prompt": "Hello", "max_tokens": 2}
        assert http.post("/v1/completions", json=body).json()["system_fingerprint"] == first.id
        assert swap(http, second.id).json()["result"] == "live"
        assert http.post("/v1/completions", json=body).json()["system_fingerprint"] == second.id


def with_engine(
    upstream: SglangStandIn, story: Callable[[SglangEngine], Coroutine[Any, Any, None]]
) -> None:
    async def told(url: str) -> None:
        engine = SglangEngine(url)
        await story(engine)
        await engine.close()

    with running(upstream.app) as url:
        asyncio.run(told(url))


def test_an_upstream_that_refuses_says_why(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, second = releases

    async def story(engine: SglangEngine) -> None:
        await engine.stage(first, tmp_path / first.id)
        with pytest.raises(EngineError, match="kept its weights: no"):
            await engine.commit(first.id)
        with pytest.raises(EngineError, match="is not staged"):
            await engine.commit(second.id)

    stand_in.refuses_updates = True
    with_engine(stand_in, story)


def test_another_network_is_refused(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, _ = releases
    config = json.loads((tmp_path / first.id / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({**config, "vocab_size": 9}))

    async def story(engine: SglangEngine) -> None:
        with pytest.raises(StageError, match="vocab_size is 9, the upstream runs 257") as raised:
            await engine.stage(first, other)
        assert re.fullmatch(
            r"start http://[\d.:]+ again on the other network", raised.value.reasons[-1]
        )

    with_engine(stand_in, story)


def test_a_stream_that_nobody_reads_is_ended(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, _ = releases

    async def story(engine: SglangEngine) -> None:
        await engine.stage(first, tmp_path / first.id)
        await engine.commit(first.id)
        generation = Generation(prompt=(1, 2), max_tokens=100_000, temperature=0.0)
        async with aclosing(engine.generate(first.id, generation)) as steps:
            await anext(steps)
            assert stand_in.num_running == 1
        async with asyncio.timeout(10):
            while stand_in.num_running:
                await asyncio.sleep(0.01)

    with_engine(stand_in, story)


def test_an_answer_that_breaks_off_or_names_no_weights_is_an_error(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, _ = releases

    async def story(engine: SglangEngine) -> None:
        await engine.stage(first, tmp_path / first.id)
        await engine.commit(first.id)
        generation = Generation(prompt=(1, 2), max_tokens=9, temperature=0.0)
        with pytest.raises(EngineError, match="broke the answer off"):
            async for _ in engine.generate(first.id, generation):
                stand_in.breaks_off = True
        stand_in.forget(version=None)
        with pytest.raises(EngineError, match="names no weight_version"):
            async for _ in engine.generate(first.id, generation):
                pass

    with_engine(stand_in, story)


def test_no_upstream_is_an_error_that_names_it(
    tmp_path: Path, releases: tuple[Release, Release]
) -> None:
    async def ask() -> None:
        engine = SglangEngine("http://127.0.0.1:9")
        with pytest.raises(EngineError, match=r"no SGLang server at http://127\.0\.0\.1:9"):
            await engine.stage(releases[0], tmp_path / releases[0].id)
        await engine.close()

    asyncio.run(ask())


@pytest.mark.parametrize("cause", ["a restart", "a way back that failed"])
def test_an_upstream_with_other_weights_ends_the_engine(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn, cause: str
) -> None:
    first, _ = releases
    set_current(tmp_path, first.id)
    with (
        running(stand_in.app) as upstream,
        running(echo_app(tmp_path, SglangEngine(upstream))) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        body = {"prompt": "Hello", "max_tokens": 4, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 200
        if cause == "a restart":
            stand_in.forget()
        else:
            stand_in.refuses_after = len(stand_in.updates) + 1
            wrong = echo_release(tmp_path, 3, probe_shift=0.01)
            assert swap(http, wrong.id).json()["result"] == "refused"
        refused = http.post("/v1/completions", json=body)
        assert refused.status_code == 503 and f"in place of {first.id}" in refused.text
        for path, status in (("/live", "dead"), ("/health", "failed")):
            answer = http.get(path)
            assert (answer.status_code, answer.json()["status"]) == (503, status)


def test_an_update_may_take_longer_than_a_barrier_is_shut_elsewhere(
    tmp_path: Path, releases: tuple[Release, Release], stand_in: SglangStandIn
) -> None:
    first, second = releases
    set_current(tmp_path, first.id)
    with (
        running(stand_in.app) as upstream,
        running(echo_app(tmp_path, SglangEngine(upstream), barrier_seconds=0.2)) as url,
        httpx.Client(base_url=url, timeout=30) as http,
    ):
        stand_in.update_seconds = 0.5
        result = swap(http, second.id).json()
        assert result["result"] == "live", result
        assert result["seconds"]["commit"] > 0.5
