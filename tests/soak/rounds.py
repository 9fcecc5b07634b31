"""One round of fire: commits, kills at moments of a job's life, rest, checks."""

import random
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from jobs.folder import METRICS
from pipeline.retrain.job import Stage, read_metrics
from tests.soak import checks, disk
from tests.soak.faults import DAMAGES, STALLED, damage, stalled
from tests.soak.stack import STOPPED, VICTIMS, StackUnderFire, rows

MOMENT_SECONDS = 60.0
"""A moment that does not come by then is over: its job may have ended already."""

GARBAGE_SHARE = 0.15
"""Of the rounds: their commit is refused, and the next one brings the rows back."""
DAMAGE_SHARE, STALLED_SHARE = 0.2, 0.2
"""Of the rounds with a damaged file and with clients that stall."""
STOPPED_SHARE, FULL_SHARE = 0.15, 0.1
"""Of the shots that stop a service in place of killing it, and that fill the disk."""
FULL_DISK = "full disk"
JOB_VICTIMS = ("runner", "agent", "job", "hub")
MOMENTS = ("push", *get_args(Stage), *3 * ("checkpoint",))


@dataclass(frozen=True)
class Shot:
    victim: str
    """Or `FULL_DISK`."""
    moment: str
    """A stage of the newest job that has begun, `checkpoint` when it has left one, or `push` while
    git waits for its answer."""
    delay_seconds: float


@dataclass(frozen=True)
class Plan:
    name: str
    """The same one gives the same rows."""
    num_commits: int
    shots: tuple[Shot, ...]
    is_garbage: bool = False
    """The one commit replaces all rows; the gate must refuse it."""
    damage: str | None = None
    """What is damaged before the commits."""
    stalled: str | None = None
    """The clients that stay connected meanwhile."""

    @classmethod
    def of(cls, seed: int, number: int) -> "Plan":
        """The same seed and number give the same plan."""
        name = f"seed {seed}, round {number}"
        choice = random.Random(name)
        shots = tuple(_shot(choice) for _ in range(choice.choice((1, 2, 2))))
        # The gate refuses a commit that replaces all rows only if there were at least 20.
        is_garbage = number > 1 and choice.random() < GARBAGE_SHARE
        num_commits = 1 if is_garbage else choice.choice((1, 1, 2))
        # A refused commit leaves the damaged release the newest: another round's matter.
        is_damaged = not is_garbage and number > 1 and choice.random() < DAMAGE_SHARE
        return cls(
            name=name,
            num_commits=num_commits,
            shots=shots,
            is_garbage=is_garbage,
            damage=choice.choice(DAMAGES) if is_damaged else None,
            stalled=choice.choice([*STALLED]) if choice.random() < STALLED_SHARE else None,
        )

    @classmethod
    def of_kills(cls, seed: int, number: int) -> "Plan":
        """Only kills of what a job here goes through. As in `of`."""
        name = f"kills of seed {seed}, round {number}"
        choice = random.Random(name)
        shots = tuple(
            Shot(choice.choice(JOB_VICTIMS), choice.choice(MOMENTS), round(choice.uniform(0, 2), 2))
            for _ in range(choice.choice((1, 2, 3)))
        )
        return cls(name, choice.choice((1, 2)), shots)

    def __str__(self) -> str:
        shots = ", ".join(
            f"{shot.victim} at {shot.moment}+{shot.delay_seconds}" for shot in self.shots
        )
        kind = "garbage" if self.is_garbage else "commits"
        faults = "".join(f"; {fault}" for fault in (self.damage, self.stalled) if fault)
        return f"{self.name} ({self.num_commits} {kind}; {shots}{faults})"


def _shot(choice: random.Random) -> Shot:
    kind = choice.random()
    if kind < STOPPED_SHARE:
        victim = choice.choice(STOPPED)
    else:
        victim = FULL_DISK if kind < STOPPED_SHARE + FULL_SHARE else choice.choice(VICTIMS)
    moment = choice.choice(MOMENTS)
    delay_seconds = round(choice.uniform(0.0, 0.5), 2)
    if victim == "git":
        return Shot(victim, "push", round(delay_seconds / 10, 3))
    return Shot(victim, moment, delay_seconds)


SMALL = (
    Plan(
        "small, round 0",
        1,
        (
            Shot("hub", "push", 0.1),
            Shot("receiver", "push", 0.0),
            Shot("job", "checkpoint", 0.0),
            Shot("runner", "checkpoint", 0.2),
        ),
    ),
    Plan(
        "small, round 1",
        1,
        (Shot("git", "push", 0.0), Shot("agent", "train", 0.0), Shot("serve", "promote", 0.0)),
    ),
    Plan(
        "small, round 2",
        1,
        (Shot("fork server", "push", 0.0),),
        is_garbage=True,
    ),
    Plan("small, round 3", 1, (Shot("up", "train", 0.0), Shot("all", "checkpoint", 0.1))),
    Plan(
        "small, round 4",
        1,
        (Shot("stopped runner", "train", 0.0), Shot("stopped receiver", "push", 0.0)),
        damage="short shard",
        stalled="unread answers",
    ),
    Plan(
        "small, round 5",
        1,
        (Shot("stopped serve", "promote", 0.0), Shot(FULL_DISK, "train", 0.0)),
        damage="lost tokens",
        stalled="unread clones",
    ),
)
"""Every kind of victim and of fault, but for some that share their cure."""


def play(stack: StackUnderFire, plan: Plan, say: Callable[[str], None] = print) -> None:
    """Raises AssertionError where a promise is broken."""
    say(str(plan))
    started = time.monotonic()
    before = checks.newest(stack)
    sightings: list[checks.Sighting] = []
    last_job = _newest_job(stack)
    try:
        if plan.damage is not None:
            damage(stack, plan.damage)
            stack.ensure_up()
        with stalled(stack, plan.stalled):
            for each in range(plan.num_commits):
                choice = random.Random(f"{plan.name}, commit {each}")
                stack.commit(rows(choice, len(stack.shas)), is_garbage=plan.is_garbage)
                shots = plan.shots[each :: plan.num_commits]
                _push_under_fire(stack, shots, last_job, sightings)
            checks.settle(stack)
        checks.check(stack)
        if plan.is_garbage:
            checks.check_refused(stack, before)
        num_resumed = sum(checks.has_resumed(stack, sighting) for sighting in sightings)
    except AssertionError as error:
        raise AssertionError(f"{plan}: {error}") from error
    stack.counts["resumed trainings"] += num_resumed
    say(f"  settled in {time.monotonic() - started:.1f} s, {num_resumed} trainings went on")


def _push_under_fire(
    stack: StackUnderFire,
    shots: Sequence[Shot],
    last_job: str | None,
    sightings: list[checks.Sighting],
) -> None:
    """Push the newest commit until it is acknowledged."""
    num_commits = len(stack.shas)
    push = stack.push()
    for shot in shots:
        if shot.moment != "push":
            # No job comes of a push that a shot before this one broke off.
            _see_through(stack, push, num_commits)
            _await(stack, shot.moment, last_job)
        time.sleep(shot.delay_seconds)
        job = _newest_job(stack)
        if job is not None and job != last_job:
            sightings.append(checks.sighting(stack, job))
        if shot.victim == FULL_DISK:
            if stack.home.is_mount():
                disk.fill(stack.home)
                stack.counts["full disks"] += 1
            else:
                stack.counts["disks not filled"] += 1
            continue
        stack.kill(shot.victim)
        if shot.victim in ("up", "all"):
            stack.start()
    _see_through(stack, push, num_commits)


def _see_through(stack: StackUnderFire, push: subprocess.Popen[bytes], num_commits: int) -> None:
    """Push until it is answered: again is no change where it was already."""
    while not stack.answered(push, num_commits):
        stack.ensure_up()
        push = stack.push()


def _newest_job(stack: StackUnderFire) -> str | None:
    folders = sorted(path.name for path in (stack.home / "jobs").glob("j*/"))
    return folders[-1] if folders else None


def _await(stack: StackUnderFire, moment: str, last_job: str | None) -> None:
    deadline = time.monotonic() + MOMENT_SECONDS
    while time.monotonic() < deadline:
        job = _newest_job(stack)
        if job is not None and job != last_job:
            metrics, _ = read_metrics(stack.home / "jobs" / job / METRICS)
            if any(metric.stage == moment for metric in metrics):
                return
            if moment == "checkpoint" and checks.sighting(stack, job).step > 0:
                return
            if (stack.home / "jobs" / job / "outcome.json").exists():
                return
        time.sleep(0.01)
