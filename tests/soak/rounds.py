"""One round of fire: commits, kills at moments of a job's life, rest, checks."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.retrain.job_folder import METRICS
from pipeline.retrain.metrics import STAGES, read_metrics
from tests.soak import checks
from tests.soak.stack import VICTIMS, StackUnderFire, rows

MOMENT_SECONDS = 20.0
"""A moment that does not come by then is over: its job may have ended already."""


@dataclass(frozen=True)
class Shot:
    victim: str
    moment: str
    """A stage of the newest job that has begun, or `push`: while git waits for its answer."""
    delay_seconds: float


@dataclass(frozen=True)
class Plan:
    num_commits: int
    shots: tuple[Shot, ...]

    @classmethod
    def of(cls, seed: int, number: int) -> "Plan":
        """The same seed and number give the same plan."""
        choice = random.Random(f"{seed}/{number}")
        shots = tuple(
            Shot(
                victim=choice.choice(VICTIMS),
                moment=choice.choice(("push", *STAGES, "train")),
                delay_seconds=round(choice.uniform(0.0, 0.5), 2),
            )
            for _ in range(choice.choice((1, 2, 2)))
        )
        return cls(num_commits=choice.choice((1, 1, 2)), shots=shots)

    def __str__(self) -> str:
        shots = ", ".join(
            f"{shot.victim} at {shot.moment}+{shot.delay_seconds}" for shot in self.shots
        )
        return f"{self.num_commits} commits; {shots}"


def play(stack: StackUnderFire, seed: int, number: int, say: Callable[[str], None] = print) -> int:
    """Returns how many processes were shot at. Raises AssertionError where a promise is broken."""
    plan = Plan.of(seed, number)
    say(f"round {number}: {plan}")
    started = time.monotonic()
    num_kills = 0
    sightings: list[checks.Sighting] = []
    last_job = _newest_job(stack)
    try:
        for each in range(plan.num_commits):
            choice = random.Random(f"{seed}/{number}/{each}")
            stack.commit(rows(choice, len(stack.shas)))
            num_commits = len(stack.shas)
            push = stack.push()
            for shot in plan.shots[each :: plan.num_commits]:
                if shot.moment != "push":
                    _await_stage(stack, shot.moment, last_job)
                time.sleep(shot.delay_seconds)
                job = _newest_job(stack)
                if job is not None and job != last_job:
                    sightings.append(checks.sighting(stack, job))
                num_kills += stack.kill(shot.victim)
                if shot.victim in ("up", "all"):
                    stack.start()
            while not stack.answered(push, num_commits):
                stack.ensure_up()
                push = stack.push()
        checks.settle(stack)
        checks.check(stack)
        for sighting in sightings:
            checks.check_progress(stack, sighting)
    except AssertionError as error:
        raise AssertionError(f"seed {seed}, round {number} ({plan}): {error}") from error
    say(f"  settled in {time.monotonic() - started:.1f} s")
    return num_kills


def _newest_job(stack: StackUnderFire) -> str | None:
    folders = sorted(path.name for path in (stack.home / "jobs").glob("j*/"))
    return folders[-1] if folders else None


def _await_stage(stack: StackUnderFire, stage: str, last_job: str | None) -> None:
    deadline = time.monotonic() + MOMENT_SECONDS
    while time.monotonic() < deadline:
        job = _newest_job(stack)
        if job is not None and job != last_job:
            metrics, _ = read_metrics(stack.home / "jobs" / job / METRICS)
            if any(metric.stage == stage for metric in metrics):
                return
            if (stack.home / "jobs" / job / "outcome.json").exists():
                return
        time.sleep(0.01)
