"""The store against a model of a few dicts: any order of pushes, runners, crashes and cancels."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from jobs.errors import LeaseLost, PendingJob
from jobs.outcome import JobOutcome
from jobs.store import Delivery, JobStore
from tests.jobs_fixtures import Clock, answer_to, new_database, postgres_server, spec

__all__ = ["postgres_server"]

NUM_EXAMPLES = int(os.environ.get("JOBS_STORE_EXAMPLES", "10"))
LEASE_SECONDS = 10.0
LOST = JobOutcome(result="failed", stage="lost", reason="Its process vanished.")
PIPELINES = st.sampled_from(["faq", "lore"])
OWNERS = st.sampled_from(["one", "two"])


@dataclass
class Expected:
    """What the model knows of a job."""

    id: str
    pipeline: str
    deliveries: list[str]
    state: str = "SCHEDULING"
    owner: str | None = None
    lease_until: float = 0.0
    attempt: int = 0
    num_lost: int = 0
    cancel_requested: bool = False
    by_hand: bool = False
    has_failed: bool = False

    @property
    def is_waiting(self) -> bool:
        return self.state == "RUNNING" and self.owner is None

    @property
    def is_free_again(self) -> bool:
        return self.state in ("ERROR", "CANCELED") or (
            self.cancel_requested and self.state != "COMPLETED"
        )


@dataclass
class Model:
    jobs: list[Expected] = field(default_factory=list)
    answers: dict[str, str] = field(default_factory=dict)
    commits: dict[str, tuple[str, int]] = field(default_factory=dict)
    """Delivery → its pipeline and its commit."""
    heads: dict[str, int] = field(default_factory=lambda: {"faq": 0, "lore": 0})

    def running(self, pipeline: str) -> Expected | None:
        return self._one([j for j in self.jobs if (j.pipeline, j.state) == (pipeline, "RUNNING")])

    def pending(self, pipeline: str, *, by_hand: bool) -> Expected | None:
        key = (pipeline, "SCHEDULING", by_hand)
        return self._one(
            [job for job in self.jobs if (job.pipeline, job.state, job.by_hand) == key]
        )

    def _one(self, found: list[Expected]) -> Expected | None:
        assert len(found) <= 1
        return found[0] if found else None

    def successor(self, job: Expected) -> Expected | None:
        return None if job.by_hand else self.pending(job.pipeline, by_hand=False)


class StoreMachine(RuleBasedStateMachine):
    url: str
    """Of an empty database; set by the tests."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.store = JobStore.open(self.url, clock=self.clock)
        assert not self.store.list()
        self.model = Model()
        self.num_deliveries = 0

    def teardown(self) -> None:
        self.store.close()

    def submit(self, pipeline: str, new: int, delivery: str) -> None:
        submission = self.store.submit(
            spec(str(new), pipeline=pipeline, max_attempts=2),
            delivery=Delivery(source="hub", id=delivery, body="{}"),
        )
        pending = self.model.pending(pipeline, by_hand=False)
        earlier = None
        if delivery in self.model.answers:
            id = self.model.answers[delivery]
            earlier = next(job for job in self.model.jobs if job.id == id)
        if earlier is not None and not earlier.is_free_again:
            assert (submission.how, submission.job.id) == ("duplicate", earlier.id)
            return
        if earlier is not None:
            earlier.deliveries.remove(delivery)
        if pending is not None:
            assert submission.how == "merged"
            job = pending
        else:
            assert submission.how == "created" and submission.is_new
            job = Expected(submission.job.id, pipeline, [])
            assert all(other.id < job.id for other in self.model.jobs)
            self.model.jobs.append(job)
        job.deliveries = sorted([*job.deliveries, delivery], key=lambda id: int(id[1:]))
        assert submission.job.id == job.id
        self.model.answers[delivery] = job.id
        self.model.commits[delivery] = (pipeline, new)

    @rule(pipeline=PIPELINES)
    def submit_by_hand(self, pipeline: str) -> None:
        head = self.model.heads[pipeline]
        by_hand = spec(str(head), pipeline=pipeline, max_attempts=2)
        if self.model.pending(pipeline, by_hand=True) is not None:
            with pytest.raises(PendingJob):
                self.store.submit(by_hand, by_hand=True)
            return
        submission = self.store.submit(by_hand, by_hand=True)
        assert submission.how == "created" and submission.job.by_hand
        self.model.jobs.append(Expected(submission.job.id, pipeline, [], by_hand=True))

    @rule(pipeline=PIPELINES)
    def push(self, pipeline: str) -> None:
        old = self.model.heads[pipeline]
        self.model.heads[pipeline] = old + 1
        self.num_deliveries += 1
        self.submit(pipeline, old + 1, f"d{self.num_deliveries}")

    @rule(pipeline=PIPELINES, back=st.integers(0, 2))
    def force_push(self, pipeline: str, back: int) -> None:
        head = self.model.heads[pipeline]
        self.num_deliveries += 1
        self.model.heads[pipeline] = max(0, head - back)
        self.submit(pipeline, max(0, head - back), f"d{self.num_deliveries}")

    @rule(data=st.data())
    def deliver_again(self, data: st.DataObject) -> None:
        if self.model.answers:
            delivery = data.draw(st.sampled_from(sorted(self.model.answers)))
            self.submit(*self.model.commits[delivery], delivery)

    @rule(owner=OWNERS)
    def claim(self, owner: str) -> None:
        claimed = self.store.claim(owner, LEASE_SECONDS)
        waiting = [job for job in self.model.jobs if job.is_waiting]
        due = waiting or [
            job
            for job in self.model.jobs
            if job.state == "SCHEDULING" and self.model.running(job.pipeline) is None
        ]
        if claimed is None:
            assert not due
            return
        job = next(job for job in due if job.id == claimed.id)
        if job.has_failed and self.model.successor(job) is not None:
            job.state = "ERROR"
            return
        job.state, job.owner, job.attempt = "RUNNING", owner, max(1, job.attempt)
        job.lease_until, job.has_failed = self.clock.now + LEASE_SECONDS, False

    @rule(seconds=st.sampled_from([1.0, 6.0, 30.0]))
    def wait(self, seconds: float) -> None:
        """Long enough, and every agent that did not beat is dead as far as others can see."""
        self.clock.now += seconds

    @rule()
    def end_what_has_expired(self) -> None:
        expected = [
            job
            for job in self.model.jobs
            if job.state == "RUNNING" and job.owner and job.lease_until <= self.clock.now
        ]
        expired = self.store.expired()
        assert [job.id for job in expired] == [job.id for job in expected]
        for job in expected:
            assert job.owner is not None
            self.store.release(job.id, job.owner)
            self.end_attempt(job)

    def end_attempt(self, job: Expected) -> None:
        if job.cancel_requested:
            job.state = "CANCELED"
        else:
            job.owner = None
            job.attempt += 1

    def leased(self, data: st.DataObject, owner: str) -> Expected | None:
        """Any job, also one that `owner` has not the lease of: None when that was refused."""
        if not self.model.jobs:
            return None
        job = data.draw(st.sampled_from(self.model.jobs))
        if job.state == "RUNNING" and job.owner == owner:
            return job
        for call in (
            lambda: self.store.heartbeat(job.id, owner, LEASE_SECONDS),
            lambda: self.store.finish(job.id, owner, None),
            lambda: self.store.retry(job.id, owner, LOST),
            lambda: self.store.release(job.id, owner),
        ):
            with pytest.raises(LeaseLost):
                call()
        return None

    @rule(data=st.data(), owner=OWNERS)
    def heartbeat(self, data: st.DataObject, owner: str) -> None:
        job = self.leased(data, owner)
        if job is not None:
            now = self.store.heartbeat(job.id, owner, LEASE_SECONDS)
            assert now.cancel_requested == job.cancel_requested
            job.lease_until = self.clock.now + LEASE_SECONDS

    @rule(
        data=st.data(),
        owner=OWNERS,
        result=st.sampled_from(["promoted", "unchanged", "failed", "cancelled"]),
    )
    def finish(self, data: st.DataObject, owner: str, result: str) -> None:
        job = self.leased(data, owner)
        if job is not None:
            self.store.finish(job.id, owner, JobOutcome.model_validate({"result": result}))
            if result == "failed":
                job.state = "ERROR"
            else:
                job.state = "CANCELED" if result == "cancelled" else "COMPLETED"

    @rule(data=st.data(), owner=OWNERS)
    def lose_the_process(self, data: st.DataObject, owner: str) -> None:
        job = self.leased(data, owner)
        if job is not None:
            self.store.retry(job.id, owner, LOST)
            job.num_lost += 1
            must_end = job.num_lost == 2 or self.model.successor(job) is not None
            if must_end and not job.cancel_requested:
                job.state = "ERROR"
            else:
                self.end_attempt(job)
                job.has_failed = True

    @rule(data=st.data(), owner=OWNERS)
    def release(self, data: st.DataObject, owner: str) -> None:
        job = self.leased(data, owner)
        if job is not None:
            self.store.release(job.id, owner)
            self.end_attempt(job)

    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        if self.model.jobs:
            job = data.draw(st.sampled_from(self.model.jobs))
            self.store.cancel(job.id)
            if job.state == "SCHEDULING" or job.is_waiting:
                job.state = "CANCELED"
            elif job.state == "RUNNING":
                job.cancel_requested = True

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = JobStore.open(self.url, clock=self.clock)

    @invariant()
    def every_job_is_as_expected(self) -> None:
        jobs = {job.id: job for job in self.store.list()}
        assert jobs.keys() == {job.id for job in self.model.jobs}
        for expected in self.model.jobs:
            job = jobs[expected.id]
            revisions = job.spec.revisions
            assert revisions is not None
            assert (job.state, job.attempt, job.num_lost) == (
                expected.state,
                expected.attempt,
                expected.num_lost,
            )
            assert (revisions.new_sha is None) is not expected.by_hand
            assert job.by_hand == expected.by_hand
            assert list(revisions.delivery_ids) == expected.deliveries

    @invariant()
    def every_delivery_has_a_job_that_answers_for_it(self) -> None:
        for delivery, job_id in self.model.answers.items():
            assert answer_to(self.store, "hub", delivery) == {"job": job_id}

    @invariant()
    def the_job_that_answers_for_a_delivery_is_found_by_its_commit(self) -> None:
        for delivery, (pipeline, commit) in self.model.commits.items():
            found = [job.id for job in self.store.of_commit(str(commit))]
            mine = [job.id for job in self.model.jobs if delivery in job.deliveries]
            assert set(mine) <= set(found)
            assert self.model.answers[delivery] in [
                job.id for job in self.model.jobs if job.pipeline == pipeline
            ]

    @invariant()
    def at_most_one_runs_and_one_of_each_kind_is_pending(self) -> None:
        running = [job.spec.pipeline for job in self.store.list(state="RUNNING")]
        assert len(running) == len(set(running))
        pending = [(job.spec.pipeline, job.by_hand) for job in self.store.list(state="SCHEDULING")]
        assert len(pending) == len(set(pending))


def check(urls: Iterator[str], num_examples: int) -> None:
    class Machine(StoreMachine):
        def __init__(self) -> None:
            self.url = next(urls)
            super().__init__()

    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_the_store_on_sqlite() -> None:
    def urls() -> Iterator[str]:
        while True:
            with TemporaryDirectory() as folder:
                yield f"sqlite:///{Path(folder) / 'jobs.db'}"

    check(urls(), NUM_EXAMPLES)


def test_the_store_on_postgres(postgres_server: str) -> None:
    def urls() -> Iterator[str]:
        while True:
            with new_database(postgres_server) as url:
                yield url

    check(urls(), max(1, NUM_EXAMPLES // 5))
