"""A small soak, so that the harness is whole and the promises are looked at on every change.

With `SOAK_KILLS` so many processes more are killed, at random by `SOAK_SEED`, as `make soak` does.
"""

import itertools
import os
from pathlib import Path

import pytest

from jobs.launchers.process import IS_LINUX
from tests.soak.__main__ import soak
from tests.soak.faults import DAMAGES, STALLED
from tests.soak.rounds import SMALL, Plan
from tests.soak.stack import STOPPED, VICTIMS

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="the victims are found in /proc")


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_nothing_is_lost_when_processes_are_killed(tmp_path: Path) -> None:
    soaked = soak(tmp_path, SMALL, kills=100)
    assert soaked.num_rounds == len(SMALL)
    num_shots = sum(len(plan.shots) + (plan.damage is not None) for plan in SMALL)
    assert soaked.num_kills == num_shots
    assert soaked.num_resumed


@pytest.mark.soak
@pytest.mark.skipif("SOAK_KILLS" not in os.environ, reason="SOAK_KILLS is not set")
@pytest.mark.timeout(0)
def test_nothing_is_lost_when_any_process_is_killed(tmp_path: Path) -> None:
    kills, seed = int(os.environ["SOAK_KILLS"]), int(os.environ.get("SOAK_SEED", "1"))
    plans = (Plan.of(seed, number) for number in itertools.count())
    assert soak(tmp_path, plans, kills).num_kills >= kills


def test_a_seed_gives_the_same_plan_again_and_all_victims_have_their_turn() -> None:
    plans = [Plan.of(7, number) for number in range(200)]
    assert plans == [Plan.of(7, number) for number in range(200)]
    assert {shot.victim for plan in plans for shot in plan.shots} == {*VICTIMS, *STOPPED}
    assert {plan.damage for plan in plans} == {None, *DAMAGES}
    assert {plan.stalled for plan in plans} == {None, *STALLED}
    assert {plan.is_garbage for plan in plans} == {True, False}
