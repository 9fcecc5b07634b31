"""A small soak, so that the harness is whole and the promises are looked at on every change."""

import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.process import IS_LINUX
from tests.disk_fixtures import unmount
from tests.soak.__main__ import soak
from tests.soak.faults import DAMAGES, STALLED
from tests.soak.rounds import FULL_DISK, SMALL, Plan
from tests.soak.stack import STOPPED, VICTIMS
from tests.stack_fixtures import workplace_in

KILLS = int(os.environ.get("SOAK_KILLS", "4"))
"""Of processes at random moments."""
SEED = int(os.environ.get("SOAK_SEED") or random.randrange(10**6))

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="the victims are found in /proc")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    home = workplace_in(tmp_path).home
    if home.is_mount():  # the soak failed
        unmount(home)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_nothing_is_lost_when_processes_are_killed(folder: Path) -> None:
    soaked = soak(folder, SMALL, kills=100)
    assert soaked["rounds"] == len(SMALL)
    num_damages = sum(plan.damage is not None for plan in SMALL)
    shots = [shot for plan in SMALL for shot in plan.shots if shot.victim != FULL_DISK]
    assert soaked["kills"] + soaked["stops"] == len(shots) + num_damages
    assert soaked["damages"] == num_damages
    assert soaked["stalled clients"]
    num_fills = sum(shot.victim == FULL_DISK for plan in SMALL for shot in plan.shots)
    assert soaked["full disks"] == (0 if soaked["disks not filled"] else num_fills)
    assert soaked["resumed trainings"]
    assert soaked["answers"] and soaked["suspensions"]


@pytest.mark.soak
@pytest.mark.timeout(600 + 60 * KILLS)
def test_every_push_has_one_outcome_whatever_was_killed(folder: Path) -> None:
    plans = (Plan.of_kills(SEED, number) for number in itertools.count())
    soaked = soak(folder, plans, KILLS)
    assert soaked["kills"] >= KILLS


def test_a_seed_gives_the_same_plan_again_and_all_victims_have_their_turn() -> None:
    plans = [Plan.of(7, number) for number in range(200)]
    assert plans == [Plan.of(7, number) for number in range(200)]
    assert {shot.victim for plan in plans for shot in plan.shots} == {*VICTIMS, *STOPPED, FULL_DISK}
    assert {plan.damage for plan in plans} == {None, *DAMAGES}
    assert {plan.stalled for plan in plans} == {None, *STALLED}
    assert {plan.is_garbage for plan in plans} == {True, False}
