"""What must hold once the stack has come to rest, whatever was killed before."""

import itertools
import os
import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import filelock
import httpx

from jobs.folder import METRICS
from jobs.job import Job
from jobs.schema import job_id_of
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job import CHECKPOINT, Metric, read_metrics, read_record
from pipeline.runner.after_jobs import LOOK_SECONDS
from serving.weights.release_store import UNFINISHED, served_release
from serving.weights.verify import verify_release
from tests.soak.faults import POISON, OtherReceiver
from tests.soak.stack import SERVICES, StackUnderFire, until

SETTLE_SECONDS = float(os.environ.get("SOAK_SETTLE_SECONDS", "240"))
"""Raise it where other programs take the cores: trainings then take several times as long."""


def settle(stack: StackUnderFire) -> None:
    """Wait until nothing is left to do: every event delivered, every job ended, all services up."""
    stack.ensure_up()
    with stack.jobs() as store:

        def is_at_rest() -> bool:
            stack.ensure_up()
            return not any(row["status"] == "pending" for row in stack.deliveries()) and all(
                job.has_ended for job in store.list(limit=20)
            )

        until(is_at_rest, SETTLE_SECONDS, "every event is delivered and every job has ended")
    until(lambda: _served_by_server(stack) == newest(stack), 60, "the newest release is served")
    until(lambda: not _surplus(stack), 60, lambda: f"no process is left over: {_surplus(stack)}")


def newest(stack: StackUnderFire) -> str | None:
    """The newest whole one."""
    whole = stack.whole_releases()
    return whole[-1].name if whole else None


def check(stack: StackUnderFire) -> None:
    """Raises AssertionError. The stack has settled."""
    _every_push_has_one_outcome(stack)
    served = served_release(stack.releases_dir)
    assert (served.name if served else None) == newest(stack), "`current` is not the newest"
    for folder in stack.whole_releases():
        reasons = verify_release(folder)
        assert not reasons, f"{folder.name} is not whole: {reasons}"
    # A job may end while its runner is stopped. `up` starts another after 8 s, which tidies up.
    until(lambda: not _leftovers(stack), 60, lambda: f"nothing is left over: {_leftovers(stack)}")


@dataclass(frozen=True)
class Sighting:
    """How far a job's training had come, as its folder told right before a shot."""

    job_id: str
    at: float
    step: int


def sighting(stack: StackUnderFire, job_id: str) -> Sighting:
    checkpoint = read_record(stack.home / "jobs" / job_id / CHECKPOINT, Checkpoint)
    return Sighting(job_id, time.time(), checkpoint.step if checkpoint is not None else 0)


def check_refused(stack: StackUnderFire, served_before: str | None) -> None:
    """The gate refused the newest commit, and what was served is served."""
    told = next(row["id"] for row in stack.deliveries() if row["new_sha"] == stack.shas[-1])
    with stack.jobs() as store:
        outcomes = [
            (job.outcome.result, job.outcome.reason)
            for job in store.list()
            if job.outcome is not None and told in job.outcome.delivery_ids
            if not _was_taken_over(job)
        ]
    assert [result for result, _ in outcomes] == ["rejected"], f"garbage came to {outcomes}"
    assert newest(stack) == served_before, "garbage made a release"


def check_other_receiver(stack: StackUnderFire, other: OtherReceiver) -> None:
    """Poison kept nothing from it: it has answered well each event but those of poison. A webhook
    that is suspended for its poison gets the others with the next probes."""
    with closing(stack.connect()) as connection:
        told = connection.execute(
            "SELECT value ->> 'new_sha' AS new_sha"
            " FROM deliveries JOIN events ON events.seq = event_seq, json_each(updated_refs)"
            " WHERE webhook_id = ? AND value ->> 'ref' = 'refs/heads/main'",
            (other.webhook_id,),
        ).fetchall()
    expected = {row["new_sha"] for row in told}

    def awaited() -> set[str]:
        return {sha for sha in expected - other.answered if not other.is_poison.get(sha)}

    def is_told_more(seen: int) -> bool:
        return not awaited() or len(other.is_poison) > seen

    while awaited():
        # Poison suspends the webhook for a minute, and several poisons may wait one after another.
        goes_on = partial(is_told_more, len(other.is_poison))
        until(goes_on, 120, lambda: f"{awaited()} reached the other receiver")
    if len(expected) > 6 * len(POISON):
        assert num_given_up(stack), "no delivery was given up"
        assert num_logged(stack, "SUSPENDED"), "no webhook was suspended"
        assert num_logged(stack, "answers again"), "no probe ended a suspension"


def num_given_up(stack: StackUnderFire) -> int:
    """The number of dead deliveries, of all webhooks."""
    with closing(stack.connect()) as connection:
        [row] = connection.execute("SELECT count(*) FROM deliveries WHERE status = 'dead'")
    return int(row[0])


def num_logged(stack: StackUnderFire, words: str) -> int:
    """How often the hub's log has the words."""
    logs = (stack.home / "logs").glob("hub.log*")
    return sum(log.read_text(errors="replace").count(words) for log in logs)


def has_resumed(stack: StackUnderFire, seen: Sighting) -> bool:
    """Whether an attempt after the sighting went on from a checkpoint that was seen.

    Raises AssertionError where one began behind it, or did anything twice.
    """
    metrics, _ = read_metrics(stack.home / "jobs" / seen.job_id / METRICS)
    attempts: list[list[Metric]] = []
    resumed = False
    for metric in metrics:
        if not attempts or (metric.event == "start" and metric.stage == "snapshot"):
            attempts.append([])
        attempts[-1].append(metric)
    for before, after in itertools.pairwise(attempts):
        steps = [metric.step for metric in after if metric.event == "step" and metric.step]
        has_trained = any(metric.stage == "train" and metric.event == "end" for metric in before)
        assert not (has_trained and steps), f"{seen.job_id} trained again after it had trained"
        assert after[0].time < seen.at or not steps or steps[0] > seen.step, (
            f"{seen.job_id} went on at step {steps[0]}, behind its checkpoint at {seen.step}"
        )
        resumed |= bool(steps) and seen.step > 0 and after[0].time >= seen.at
    return resumed


def check_down(stack: StackUnderFire) -> None:
    """After a stop in order: no process, no lock that is held, no record of what runs."""
    until(lambda: not stack.processes(), 30, lambda: f"no process is left: {stack.processes()}")
    records = [stack.home / f"stack.{suffix}" for suffix in ("json", "draft")]
    assert not any(map(Path.exists, records)), "a record of what runs is left"
    locks = [*stack.home.glob("*.lock"), *stack.home.glob("hub/*.lock")]
    for lock in [*locks, *stack.home.glob("releases/*/.lock")]:
        with filelock.FileLock(lock, timeout=0):
            pass


def _every_push_has_one_outcome(stack: StackUnderFire) -> None:
    place = {sha: number for number, sha in enumerate(stack.shas)}
    deliveries = stack.deliveries()
    assert all(row["status"] == "delivered" for row in deliveries), "a delivery was given up"
    with stack.jobs() as store:
        jobs = store.list()
    answers: dict[str, list[Job]] = {row["id"]: [] for row in deliveries}
    for job in jobs:
        assert job.outcome is not None
        if not _was_taken_over(job):
            assert job.outcome.result != "failed", f"{job.id} failed: {job.outcome.reason}"
        for delivery_id in job.outcome.delivery_ids:
            answers[delivery_id].append(job)
    for delivery_id, answering in answers.items():
        told = [job.id for job in answering]
        assert len(told) == 1, f"delivery {delivery_id} has {len(told)} outcomes: {told}"
    for number in range(stack.num_acknowledged):
        covering = [
            row["id"]
            for row in deliveries
            if place.get(row["old_sha"], -1) < number <= place.get(row["new_sha"], -1)
        ]
        assert len(covering) == 1, f"commit {number} stands in {len(covering)} events: {covering}"


def _was_taken_over(job: Job) -> bool:
    reason = (job.outcome and job.outcome.reason) or ""
    return job.state == "ERROR" and reason.endswith(" trains on the newest commit.")


def _served_by_server(stack: StackUnderFire) -> str | None:
    """What the server answers with; None where it has nothing to answer with yet."""
    asked = {"model": "facts", "prompt": "Shelf", "max_tokens": 1, "temperature": 0}
    try:
        answer = httpx.post(
            f"{stack.workplace.url('serving')}/v1/completions", json=asked, timeout=60
        )
    except httpx.TransportError:
        return "no server"
    if answer.status_code != 200:
        return None
    return str(answer.json()["system_fingerprint"])


def _surplus(stack: StackUnderFire) -> list[str]:
    """Processes that a stack at rest does not have."""
    found = stack.victims()
    expected = [
        pid
        for name in (*SERVICES, "up", "fork server", "resource tracker")
        for pid in found[name][:1]
    ]
    lines = stack.processes()
    return [f"{pid}: {line}" for pid, line in lines.items() if pid not in expected]


def _leftovers(stack: StackUnderFire) -> list[str]:
    """Files and folders whose writer was killed, or whose job has ended; outcomes that nobody
    handles."""
    found: list[Path | str] = [*stack.releases_dir.glob(f"{UNFINISHED}*")]
    found += (stack.home / "hub" / "incoming").iterdir()
    for pattern in ("**/*.lock", "**/tmp_*", "**/incoming-*"):
        found += (stack.home / "hub" / "repos").glob(pattern)
    found += [*stack.home.glob("*.draft"), *stack.home.glob(".tokens*")]
    with stack.jobs() as store:
        # One that another took over left its outcome to the store.
        told = {job.id: not _was_taken_over(job) for job in store.list()}
    # A runner that was killed while it handled an outcome had taken it. When that time is over,
    # the next look of another one finds it. Nothing else leaves an outcome, or checkpoints.
    query = "SELECT number, ifnull(lease_until, 0) > ? FROM jobs WHERE handled_at IS NULL"
    with closing(sqlite3.connect(stack.home / "jobs/jobs.sqlite", timeout=10)) as database:
        rows = database.execute(query, (time.time() - LOOK_SECONDS,)).fetchall()
    taken = {job_id_of(number) for number, is_taken in rows if is_taken}
    found += [f"the outcome of {job_id_of(number)}" for number, is_taken in rows if not is_taken]
    for folder in (stack.home / "jobs").glob("j*/"):
        is_told = told.get(folder.name)
        if is_told is None or (is_told and not (folder / "outcome.json").exists()):
            found.append(folder)
        found += [
            path
            for path in folder.iterdir()
            if path.name.startswith(".")
            or (path.name == "checkpoints" and folder.name not in taken)
        ]
    return [str(each) for each in found]
