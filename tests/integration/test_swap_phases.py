"""Swaps on the echo engine, phase by phase: whatever goes wrong, the old release goes on."""

import asyncio
import json
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from serving.admission import Admission, LiveRelease
from serving.engine import EngineError, Generation, StageError
from serving.engines.echo_engine import EchoEngine
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_attempt import SwapAttempt
from serving.swap_schemas import SwapResult
from serving.weights import releases
from serving.weights.release import Release
from tests.serving_fixtures import echo_release

BOTH = pytest.mark.parametrize("holds_two", [True, False], ids=["holds two", "in place"])


class House:
    """A swapper with what it needs, and two releases, the first of which is live."""

    def __init__(self, pipeline_dir: Path, *, holds_two: bool = True) -> None:
        self.pipeline_dir = pipeline_dir
        self.engine = EchoEngine(holds_two=holds_two)
        self.admission = Admission(100)
        self.swapper = Swapper(
            engine=self.engine,
            admission=self.admission,
            settings=ServingSettings(drain_seconds=0.2, phase_seconds=1, barrier_seconds=0.4),
            releases_dir=pipeline_dir,
            pipeline="answers",
            metrics=Metrics(),
        )
        self.old = echo_release(pipeline_dir, 1)
        self.new = echo_release(pipeline_dir, 2)

    async def start(self) -> None:
        releases.set_current(self.pipeline_dir, self.old.id)
        await self.swapper.start()
        assert self.admission.live is not None and self.admission.live.id == self.old.id

    def release(self, seed: int) -> Release:
        return echo_release(self.pipeline_dir, seed)

    async def answers(self) -> str:
        """The release that a whole request was answered by, under its weights."""
        live = await asyncio.wait_for(self.admission.enter(), 1)
        try:
            generation = Generation(prompt=(1,), max_tokens=2, temperature=0.0)
            steps = [step async for step in self.engine.generate(live.id, generation)]
            assert steps[-1].finish_reason is not None
            return live.id
        finally:
            self.admission.leave(live)

    async def check_old_goes_on(self) -> None:
        assert not self.admission.is_closed
        self.engine.hang.clear()
        self.engine.fail.clear()
        await asyncio.sleep(0)
        assert await self.answers() == self.old.id
        assert releases.served_release(self.pipeline_dir) == self.pipeline_dir / self.old.id
        await until(lambda: self.engine.resident == {self.old.id})
        # And nothing stands in the way of the next swap.
        third = self.release(33)
        assert (await self.swapper.swap(third.id)).result == "live"
        assert await self.answers() == third.id


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():
            await asyncio.sleep(0.001)


def play(
    tmp_path: Path, story: Callable[[House], Awaitable[None]], *, holds_two: bool = True
) -> None:
    async def whole() -> None:
        house = House(tmp_path / "answers", holds_two=holds_two)
        await house.start()
        try:
            await story(house)
        finally:
            await house.swapper.close()

    asyncio.run(whole())


@BOTH
def test_a_swap_and_its_way_back(tmp_path: Path, holds_two: bool) -> None:
    async def story(house: House) -> None:
        result = await house.swapper.swap(house.new.id)
        assert (result.result, result.phase, result.previous) == ("live", "live", house.old.id)
        assert result.probe_max_difference == 0
        assert result.seconds.keys() == {"preflight", "stage", "probe", "barrier", "commit"}
        assert await house.answers() == house.new.id
        assert releases.served_release(house.pipeline_dir) == house.pipeline_dir / house.new.id
        assert house.admission.previous == house.old.id
        await until(lambda: house.engine.resident == {house.new.id})
        again = await house.swapper.swap(house.new.id)
        assert (again.result, again.seconds) == ("live", {})
        back = await house.swapper.swap(str(house.pipeline_dir / house.old.id))
        assert back.result == "live"
        assert await house.answers() == house.old.id

    play(tmp_path, story, holds_two=holds_two)


def truncate(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 4)


def lose_a_shard(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def flip_a_bit(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)


def lose_the_manifest(folder: Path) -> None:
    (folder / "release.json").write_text("{}")


def break_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")


def other_bounds(folder: Path) -> None:
    manifest = json.loads((folder / "release.json").read_text())
    manifest["probe"]["bounds"] = {"bfloat16": 0.1}
    (folder / "release.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate, "it holds tensor layer.0.weight, layer.1.weight, layer.2.weight"),
        (lose_a_shard, "safetensors: missing; it holds tensor layer.0.weight"),
        (flip_a_bit, "safetensors: tensor layer.2.weight: digest is"),
        (lose_the_manifest, "release.json: id"),
        (break_the_tokenizer, "tokenizer.json: truncated"),
        (other_bounds, "no bound for float32"),
    ],
)
def test_preflight_refuses_before_the_engine_sees_a_byte(
    tmp_path: Path, damage: Callable[[Path], None], said: str
) -> None:
    async def story(house: House) -> None:
        damage(house.pipeline_dir / house.new.id)
        log = list(house.engine.log)
        result = await house.swapper.swap(house.new.id)
        assert (result.result, result.phase) == ("refused", "preflight")
        assert any(said in reason for reason in result.reasons), result.reasons
        assert house.engine.log == log
        await house.check_old_goes_on()

    play(tmp_path, story)


@pytest.mark.parametrize(
    "requested", ["../outside", "/etc", "", ".", "..", "r000099-00000000", "current", "current/.."]
)
def test_only_releases_under_the_root_can_be_asked_for(tmp_path: Path, requested: str) -> None:
    async def story(house: House) -> None:
        outside = house.pipeline_dir.parent / "outside"
        os.rename(house.pipeline_dir / house.new.id, outside)
        result = await house.swapper.swap(requested)
        if requested == "current":  # a link to what is live, and so it is
            assert result.result == "live"
        else:
            assert result.result == "refused" and "no release in" in result.reasons[0]
        assert await house.answers() == house.old.id

    play(tmp_path, story)


@BOTH
@pytest.mark.parametrize("how", ["stale head", "wrong probe"])
def test_a_probe_that_does_not_match_is_refused(tmp_path: Path, how: str, holds_two: bool) -> None:
    async def story(house: House) -> None:
        release = house.new
        if how == "stale head":
            house.engine.keeps_old_head = True
        else:
            release = echo_release(house.pipeline_dir, 3, probe_shift=0.01)
        result = await house.swapper.swap(release.id)
        assert (result.result, result.phase) == ("refused", "probe")
        assert "probe text 1, token" in result.reasons[0]
        assert result.probe_max_difference is not None and result.probe_max_difference > 1e-4
        house.engine.keeps_old_head = False
        await house.check_old_goes_on()

    play(tmp_path, story, holds_two=holds_two)


@BOTH
def test_what_an_engine_cannot_stage_is_refused(tmp_path: Path, holds_two: bool) -> None:
    async def story(house: House) -> None:
        house.engine.fail["stage"] = StageError("a.safetensors: tensor x: NaN", "and more")
        result = await house.swapper.swap(house.new.id)
        assert (result.result, result.phase) == ("refused", "stage")
        assert result.reasons == ("a.safetensors: tensor x: NaN", "and more")
        await house.check_old_goes_on()

    play(tmp_path, story, holds_two=holds_two)


@BOTH
@pytest.mark.parametrize("phase", ["stage", "commit", "generate"])
@pytest.mark.parametrize("how", ["fail", "hang"])
def test_an_engine_in_trouble_fails_the_swap_and_the_barrier_opens(
    tmp_path: Path, phase: str, how: str, holds_two: bool
) -> None:
    async def story(house: House) -> None:
        if how == "fail":
            house.engine.fail[phase] = EngineError("out of order")  # type: ignore[index]
        else:
            house.engine.hang[phase] = asyncio.Event()  # type: ignore[index]
        result = await asyncio.wait_for(house.swapper.swap(house.new.id), 5)
        assert result.result == "failed"
        assert result.phase == ("probe" if phase == "generate" else phase)
        assert ("out of order" if how == "fail" else "more than") in result.reasons[0]
        await house.check_old_goes_on()

    play(tmp_path, story, holds_two=holds_two)


@BOTH
def test_a_disk_that_cannot_take_the_link_fails_the_swap(
    tmp_path: Path, holds_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(house: House) -> None:
        with monkeypatch.context() as patch:

            def full(*_: object) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(releases, "set_current", full)
            result = await house.swapper.swap(house.new.id)
        assert result.result == "failed" and "No space left" in result.reasons[0]
        await house.check_old_goes_on()

    play(tmp_path, story, holds_two=holds_two)


def test_a_release_that_cannot_be_read_to_its_end_fails_the_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_back = threading.Event()

    async def story(house: House) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(releases, "load_release", lambda folder: disk_is_back.wait(10))
            result = await house.swapper.swap(house.new.id)
        assert (result.result, result.phase) == ("failed", "preflight")
        assert result.reasons == ("preflight took more than 1 s",)
        disk_is_back.set()
        await house.check_old_goes_on()

    play(tmp_path, story)


@BOTH
def test_a_disk_that_hangs_keeps_no_barrier_shut(
    tmp_path: Path, holds_two: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk_is_back = threading.Event()
    set_current = releases.set_current

    def hang(pipeline_dir: Path, release_id: str) -> None:
        assert disk_is_back.wait(10)
        set_current(pipeline_dir, release_id)

    async def story(house: House) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(releases, "set_current", hang)
            async with asyncio.timeout(3):
                result = await house.swapper.swap(house.new.id)
                assert result.result == "failed" and "not written within" in result.reasons[0]
                assert await house.answers() == house.old.id
            written: list[str] = []
            patch.setattr(releases, "fsync_dir", lambda path: written.append(os.readlink(link)))
            link = house.pipeline_dir / releases.CURRENT
            disk_is_back.set()
            # Both writes come late, and the last one is what is served.
            await until(lambda: len(written) == 2)
            assert written == [house.new.id, house.old.id]
        await house.check_old_goes_on()

    try:
        play(tmp_path, story, holds_two=holds_two)
    finally:
        disk_is_back.set()


def test_new_requests_wait_for_an_engine_that_must_drain(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        running = await house.admission.enter()
        swapping = asyncio.create_task(house.swapper.swap(house.new.id))
        await until(lambda: house.admission.is_closed)
        waiting = asyncio.create_task(house.admission.enter())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        house.admission.leave(running)
        assert (await swapping).result == "live"
        late = await waiting
        assert (running.id, late.id) == (house.old.id, house.new.id)
        house.admission.leave(late)

    play(tmp_path, story, holds_two=False)


def test_a_drain_that_takes_too_long_is_deferred(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        releases.set_pending(house.pipeline_dir, house.new.id)
        running = await house.admission.enter()
        result = await house.swapper.swap(house.new.id)
        assert (result.result, result.phase) == ("deferred", "barrier")
        assert house.old.id in result.reasons[0]
        assert releases.pending_release(house.pipeline_dir) == house.new.id
        house.admission.leave(running)
        await house.check_old_goes_on()

    play(tmp_path, story, holds_two=False)


def test_requests_never_wait_for_an_engine_that_holds_two(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        running = await house.admission.enter()
        assert (await house.swapper.swap(house.new.id)).result == "live"
        assert await house.answers() == house.new.id
        assert house.engine.resident == {house.old.id, house.new.id}
        generation = Generation(prompt=(1,), max_tokens=1)
        assert [step async for step in house.engine.generate(running.id, generation)]
        house.admission.leave(running)
        await until(lambda: house.engine.resident == {house.new.id})

    play(tmp_path, story)


def test_the_way_back_to_a_release_that_still_answers_needs_no_disk(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        running = await house.admission.enter()
        assert (await house.swapper.swap(house.new.id)).result == "live"
        staged = house.engine.log.count(("stage", house.old.id))
        assert (await house.swapper.swap(house.old.id)).result == "live"
        assert house.engine.log.count(("stage", house.old.id)) == staged
        await until(lambda: house.engine.resident == {house.old.id})
        house.admission.leave(running)
        assert await house.answers() == house.old.id

    play(tmp_path, story)


def test_a_failed_way_back_frees_nothing_that_still_answers(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        running = await house.admission.enter()
        assert (await house.swapper.swap(house.new.id)).result == "live"
        house.engine.fail["generate"] = EngineError("out of order")
        assert (await house.swapper.swap(house.old.id)).result == "failed"
        del house.engine.fail["generate"]
        generation = Generation(prompt=(1,), max_tokens=1)
        assert [step async for step in house.engine.generate(running.id, generation)]
        house.admission.leave(running)
        await until(lambda: house.engine.resident == {house.new.id})

    play(tmp_path, story)


def test_a_third_release_waits_for_the_first_to_end(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        running = await house.admission.enter()
        assert (await house.swapper.swap(house.new.id)).result == "live"
        third = house.release(3)
        result = await house.swapper.swap(third.id)
        assert (result.result, result.phase) == ("deferred", "stage")
        assert await house.answers() == house.new.id
        asyncio.get_running_loop().call_later(0.05, house.admission.leave, running)
        assert (await house.swapper.swap(third.id)).result == "live"

    play(tmp_path, story)


def test_a_newer_request_overtakes_what_has_not_begun_to_commit(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        first, second, third = house.new, house.release(3), house.release(4)
        gate = house.engine.hang["stage"] = asyncio.Event()
        asked: list[asyncio.Task[SwapResult]] = []
        for release in (first, second, third):
            asked.append(asyncio.create_task(house.swapper.swap(release.id)))
            await until(lambda: ("stage", first.id) in house.engine.log)
        twice = asyncio.create_task(house.swapper.swap(third.id))
        await asyncio.sleep(0)
        gate.set()
        results = await asyncio.gather(*asked, twice)
        assert [result.result for result in results] == ["superseded", "superseded", "live", "live"]
        assert [result.superseded_by for result in results[:2]] == [third.id, third.id]
        assert ("stage", second.id) not in house.engine.log
        assert house.engine.log.count(("stage", third.id)) == 1
        assert await house.answers() == third.id
        await until(lambda: house.engine.resident == {third.id})

    play(tmp_path, story)


def test_one_may_wait_while_one_commits(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        third, fourth = house.release(3), house.release(4)
        gate = house.engine.hang["commit"] = asyncio.Event()
        first = asyncio.create_task(house.swapper.swap(house.new.id))
        await until(lambda: ("commit", house.new.id) in house.engine.log)
        waiting = asyncio.create_task(house.swapper.swap(third.id))
        await asyncio.sleep(0)
        newer = asyncio.create_task(house.swapper.swap(fourth.id))
        assert (await waiting).superseded_by == fourth.id
        gate.set()
        assert (await first).result == "live"
        assert (await newer).result == "live"
        assert await house.answers() == fourth.id

    play(tmp_path, story)


def test_the_first_release_comes_after_none(tmp_path: Path) -> None:
    async def story() -> None:
        house = House(tmp_path)
        await house.swapper.start()  # nothing is served yet
        try:
            first = await house.swapper.swap(house.old.id)
            again = await house.swapper.swap(house.old.id)
        finally:
            await house.swapper.close()
        assert (first.result, first.previous) == ("live", None)
        assert (again.result, again.previous) == ("live", house.old.id)

    asyncio.run(story())


def test_a_swap_goes_on_when_who_asked_hangs_up(tmp_path: Path) -> None:
    async def story(house: House) -> None:
        gate = house.engine.hang["stage"] = asyncio.Event()
        asked = asyncio.create_task(house.swapper.swap(house.new.id))
        await until(lambda: ("stage", house.new.id) in house.engine.log)
        asked.cancel()
        gate.set()
        await until(lambda: house.admission.previous == house.old.id)
        assert await house.answers() == house.new.id

    play(tmp_path, story)


def started(pipeline_dir: Path) -> LiveRelease | None:
    async def whole() -> LiveRelease | None:
        admission = Admission(1)
        swapper = Swapper(
            engine=EchoEngine(),
            admission=admission,
            settings=ServingSettings(),
            releases_dir=pipeline_dir,
            pipeline="answers",
            metrics=Metrics(),
        )
        await swapper.start()
        await swapper.close()
        return admission.live

    return asyncio.run(whole())


def test_a_server_starts_with_current_and_then_swaps_pending_in(tmp_path: Path) -> None:
    assert started(tmp_path) is None
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    releases.set_pending(tmp_path, first.id)
    live = started(tmp_path)
    assert live is not None and live.id == first.id
    assert releases.served_release(tmp_path) == tmp_path / first.id
    assert releases.pending_release(tmp_path) is None
    releases.set_pending(tmp_path, second.id)
    live = started(tmp_path)
    assert live is not None and live.id == second.id
    assert releases.pending_release(tmp_path) is None


def test_a_way_back_that_was_asked_for_without_a_server_is_taken_at_the_start(
    tmp_path: Path,
) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    releases.set_current(tmp_path, second.id)
    releases.set_pending(tmp_path, first.id)
    live = started(tmp_path)
    assert live is not None and live.id == first.id
    assert releases.served_release(tmp_path) == tmp_path / first.id
    assert releases.pending_release(tmp_path) is None


def test_a_pending_release_that_is_refused_is_not_tried_for_ever(tmp_path: Path) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    releases.set_current(tmp_path, first.id)
    for damage in (flip_a_bit, lose_the_manifest):
        releases.set_pending(tmp_path, second.id)
        damage(tmp_path / second.id)
        live = started(tmp_path)
        assert live is not None and live.id == first.id
        assert releases.pending_release(tmp_path) is None


def test_a_broken_current_release_does_not_keep_the_pending_one_out(tmp_path: Path) -> None:
    first, second = echo_release(tmp_path, 1), echo_release(tmp_path, 2)
    releases.set_current(tmp_path, first.id)
    releases.set_pending(tmp_path, second.id)
    flip_a_bit(tmp_path / first.id)
    live = started(tmp_path)
    assert live is not None and live.id == second.id


def test_the_last_release_may_leave_just_before_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(house: House) -> None:
        phases = house.swapper._phases
        preflight = phases._preflight

        async def leave() -> None:
            phases._retiring.clear()

        async def preflight_then_leave(swap: SwapAttempt) -> LiveRelease:
            candidate = await preflight(swap)
            # It begins, and ends, between the decision to wait and the wait.
            phases._retiring["r000000-00000000"] = asyncio.create_task(leave())
            return candidate

        monkeypatch.setattr(phases, "_preflight", preflight_then_leave)
        result = await house.swapper.swap(house.new.id)
        assert result.result == "live"
        assert await house.answers() == house.new.id

    play(tmp_path, story)
