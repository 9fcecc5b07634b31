"""Jobs by hand wait beside the pushes: neither is merged away. On SQLite and on Postgres."""

import pytest

from jobs.errors import PendingJob
from jobs.job import Head, Job
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, claim, delivery, lost, spec


def new_sha(job: Job) -> str | None:
    assert job.spec.revisions is not None
    return job.spec.revisions.new_sha


def test_a_push_leaves_a_job_by_hand_alone(store: JobStore) -> None:
    by_hand = store.submit(spec("x", settings={"force": True}), by_hand=True)
    assert by_hand.by_hand
    pushed = store.submit(spec("b", "a"), delivery=delivery("d1"))
    again = store.submit(spec("c", "b"), delivery=delivery("d2"))
    assert (pushed.id, again.id) == ("j000002", "j000002")
    assert store.get(by_hand.id) == by_hand
    assert [new_sha(job) for job in store.list()] == [None, "x"]


def test_one_job_by_hand_is_pending_per_pipeline(store: JobStore) -> None:
    first = store.submit(spec("x"), by_hand=True)
    with pytest.raises(PendingJob, match=first.id):
        store.submit(spec("y"), by_hand=True)
    store.submit(spec("y", pipeline="another"), by_hand=True)
    assert store.get(first.id) == first


def test_a_lost_job_by_hand_is_tried_again_although_a_push_waits(store: JobStore) -> None:
    store.submit(spec("x"), by_hand=True)
    running = claim(store)
    store.submit(spec("b", "a"), delivery=delivery("d1"))
    again = store.retry(running.id, "me", lost(running))
    assert (again.state, again.attempt) == ("RUNNING", 2)


def test_the_jobs_of_a_commit(store: JobStore) -> None:
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    running = claim(store)
    second = store.submit(spec("c", "b"), delivery=delivery("d2"))
    assert store.submit(spec("d", "c"), delivery=delivery("d3")).id == second.id
    assert [job.id for job in store.of_commit("b")] == [first.id]
    assert [job.id for job in store.of_commit("c")] == [second.id], "it was absorbed"
    assert [job.id for job in store.of_commit("d")] == [second.id]
    assert store.of_commit("e") == []
    store.finish(running.id, "me", DONE)
    head = Head(sha="e", payload={})
    trained = store.claim("me", 60, lambda job: head)
    assert trained is not None
    assert [job.id for job in store.of_commit("e")] == [second.id], "its delivery was lost"
