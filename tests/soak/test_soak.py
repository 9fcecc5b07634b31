"""A small soak, so that the harness is whole and the promises are looked at on every change.

`SOAK_KILLS` is how many processes are killed, `SOAK_SEED` which and when; `make soak` does many.
"""

import os
from pathlib import Path

import pytest

from jobs.launchers.process import IS_LINUX
from tests.soak.__main__ import soak
from tests.soak.rounds import Plan
from tests.soak.stack import VICTIMS

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="the victims are found in /proc")


@pytest.mark.slow
def test_nothing_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    kills = int(os.environ.get("SOAK_KILLS", "2"))
    num_kills, _ = soak(tmp_path, seed=int(os.environ.get("SOAK_SEED", "1")), kills=kills)
    assert num_kills >= kills


def test_a_seed_gives_the_same_plan_again_and_all_victims_have_their_turn() -> None:
    plans = [Plan.of(7, number) for number in range(200)]
    assert plans == [Plan.of(7, number) for number in range(200)]
    assert {shot.victim for plan in plans for shot in plan.shots} == set(VICTIMS)
