"""What a server that starts serves, and what it then swaps in."""

import asyncio
from pathlib import Path

import pytest

from serving.admission import Admission, LiveRelease
from serving.engines.echo_engine import EchoEngine
from serving.metrics import Metrics
from serving.settings import ServingSettings
from serving.swap import Swapper
from serving.swap_attempt import SwapAttempt
from serving.weights import releases
from tests.serving_fixtures import echo_release
from tests.swap_fixtures import House, flip_a_bit, lose_the_manifest, play


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
