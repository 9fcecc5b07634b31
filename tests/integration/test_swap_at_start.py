"""What a server that starts serves, and what it then swaps in."""

import asyncio
import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from serving.admission import Admission, LoadedRelease
from serving.engine import EngineError
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.weights import release_store
from tests.contract.engine_bench import swap
from tests.echo_engine import EchoEngine, EnginePhase
from tests.serving_fixtures import echo_app, echo_release, running
from tests.swap_fixtures import House, flip_a_bit, lose_a_shard, lose_the_manifest


async def started(pipeline_dir: Path) -> LoadedRelease | None:
    admission = Admission(1, "answers")
    swapper = Swapper(
        engine=EchoEngine(),
        admission=admission,
        settings=ServingSettings(),
        pipeline_dir=pipeline_dir,
        pipeline="answers",
        metrics=Metrics("answers"),
    )
    await swapper.start()
    await swapper.close()
    return admission.live


async def test_a_server_starts_with_current_and_then_swaps_pending_in(tmp_path: Path) -> None:
    assert await started(tmp_path) is None
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    release_store.set_pending(tmp_path, first.id)
    live = await started(tmp_path)
    assert live is not None and live.id == first.id
    assert release_store.served_release(tmp_path) == tmp_path / first.id
    assert release_store.pending_release(tmp_path) is None
    for release in (second, first):  # a rollback that was asked for without a server, too
        release_store.set_pending(tmp_path, release.id)
        live = await started(tmp_path)
        assert live is not None and live.id == release.id
        assert release_store.served_release(tmp_path) == tmp_path / release.id
        assert release_store.pending_release(tmp_path) is None


async def test_a_release_that_was_named_at_the_start_is_recorded_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    release_store.set_current(tmp_path, first.id)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    house = House(tmp_path)
    await house.swapper.start(tmp_path / second.id)
    assert release_store.served_or_empty(tmp_path).release == first.id, "it was only tried out"
    assert (await house.swapper.swap(second.id)).result == "live"
    with monkeypatch.context() as patch:
        # The record is written, and the link `current` is not.
        patch.setattr(release_store, "link_atomically", full)
        assert (await house.swapper.swap(first.id)).result == "failed"
    await house.swapper.close()
    assert release_store.served_or_empty(tmp_path).release == second.id
    live = await started(tmp_path)
    assert live is not None and live.id == second.id


async def test_a_pending_release_that_is_refused_is_not_tried_for_ever(tmp_path: Path) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    release_store.set_current(tmp_path, first.id)
    for damage in (flip_a_bit, lose_the_manifest):
        release_store.set_pending(tmp_path, second.id)
        damage(tmp_path / second.id)
        live = await started(tmp_path)
        assert live is not None and live.id == first.id
        assert release_store.pending_release(tmp_path) is None


async def test_a_broken_current_release_does_not_keep_the_pending_one_out(tmp_path: Path) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    release_store.set_current(tmp_path, first.id)
    release_store.set_pending(tmp_path, second.id)
    flip_a_bit(tmp_path / first.id)
    live = await started(tmp_path)
    assert live is not None and live.id == second.id


def put_live(pipeline_dir: Path, *seeds: int) -> list[str]:
    """Releases that were live one after the other."""
    ids = [echo_release(pipeline_dir, seed).id for seed in seeds]
    for release in ids:
        release_store.set_current(pipeline_dir, release)
    return ids


def lose_the_whole_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [lose_a_shard, lose_the_manifest, lose_the_whole_folder])
def test_a_server_whose_release_is_damaged_starts_on_the_one_before_it_and_says_so(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    _, before, damaged = put_live(tmp_path, 1, 2, 3)
    damage(tmp_path / damaged)
    for _ in range(2):  # the second start knows it from the disk
        caplog.clear()
        with running(echo_app(tmp_path)) as url:
            health = httpx.get(f"{url}/health")
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
        assert health.status_code == 200
        assert health.json()["release"] == before
        assert health.json()["stands_in_for"] == damaged
        assert health.json()["reason"].startswith(f"{damaged} cannot be served: ")
        assert answer.status_code == 200
        assert answer.headers["X-Model-Release"] == before
        assert answer.headers["X-Stands-In-For"] == damaged
        assert release_store.served_release(tmp_path) == tmp_path / before
        assert release_store.stood_in_for(tmp_path) == damaged
        (said,) = (
            each.getMessage()
            for each in caplog.records
            if "is served as its substitute" in each.getMessage()
        )
        assert said.startswith(f"{damaged} cannot be served: ") and before in said


async def test_a_release_that_was_gone_back_from_or_never_live_does_not_stand_in(
    tmp_path: Path,
) -> None:
    first, second = put_live(tmp_path, 1, 2)
    release_store.set_current(tmp_path, first)
    echo_release(tmp_path, 3)  # published, and never live
    (damaged,) = put_live(tmp_path, 4)
    lose_a_shard(tmp_path / damaged)
    live = await started(tmp_path)
    assert live is not None and live.id == first
    lose_a_shard(tmp_path / first)
    assert await started(tmp_path) is None
    assert second in release_store.release_ids(tmp_path)


def test_without_a_whole_release_that_was_live_every_answer_gives_the_real_reason(
    tmp_path: Path,
) -> None:
    echo_release(tmp_path, 1)
    (damaged,) = put_live(tmp_path, 2)
    lose_a_shard(tmp_path / damaged)
    with running(echo_app(tmp_path)) as url:
        health = httpx.get(f"{url}/health")
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a"})
    assert (health.status_code, health.json()["status"]) == (503, "waiting")
    assert answer.status_code == 503
    for said in (health.json()["reason"], answer.json()["error"]["message"]):
        assert damaged in said and "safetensors: missing" in said
    assert "pipeline releases verify" in answer.json()["error"]["message"]


async def test_a_release_that_is_whole_again_is_served_again_at_the_next_start(
    tmp_path: Path,
) -> None:
    before, damaged = put_live(tmp_path, 1, 2)
    elsewhere = (tmp_path / damaged).rename(tmp_path / "elsewhere")
    live = await started(tmp_path)
    assert live is not None and live.id == before
    elsewhere.rename(tmp_path / damaged)
    live = await started(tmp_path)
    assert live is not None and live.id == damaged and live.stands_in_for is None
    assert release_store.stood_in_for(tmp_path) is None


@pytest.mark.parametrize("how", ["swap", "pending"])
async def test_a_release_that_stands_in_may_be_chosen_and_then_stays(
    tmp_path: Path, how: str
) -> None:
    before, damaged = put_live(tmp_path, 1, 2)
    elsewhere = (tmp_path / damaged).rename(tmp_path / "elsewhere")
    if how == "pending":
        release_store.set_pending(tmp_path, before)
        assert await started(tmp_path) is not None
    else:
        with running(echo_app(tmp_path)) as url, httpx.Client(base_url=url) as http:
            assert swap(http, before).json()["result"] == "live"
            assert "stands_in_for" not in http.get("/health").json()
    elsewhere.rename(tmp_path / damaged)
    live = await started(tmp_path)
    assert live is not None and live.id == before and live.stands_in_for is None


async def test_the_first_stage_has_the_time_of_a_start(tmp_path: Path) -> None:
    put_live(tmp_path, 1)
    house = House(tmp_path)
    settings = {"engine": "vllm", "vllm": {"start_seconds": 5}, "phase_seconds": 0.2}
    house.swapper.settings = ServingSettings.model_validate(settings)
    is_slow = house.engine.hang["stage"] = asyncio.Event()
    asyncio.get_running_loop().call_later(0.4, is_slow.set)
    await house.swapper.start()
    assert house.admission.live is not None
    is_slow.clear()
    assert (await house.swapper.swap(echo_release(tmp_path, 2).id)).result == "failed"
    await house.swapper.close()


@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_an_engine_in_trouble_is_not_a_reason_for_an_older_release(
    tmp_path: Path, phase: EnginePhase
) -> None:
    before, current = put_live(tmp_path, 1, 2)
    engine = EchoEngine()
    engine.fail[phase] = EngineError("no memory")
    with running(echo_app(tmp_path, engine)) as url:
        health = httpx.get(f"{url}/health")
    assert health.status_code == 503 and "no memory" in health.json()["reason"]
    assert release_store.served_release(tmp_path) == tmp_path / current
    assert release_store.served_or_empty(tmp_path).history == (before, current)
