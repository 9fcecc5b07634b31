"""What becomes of a delivery: a job, part of one, or nothing. On SQLite and on Postgres."""

import threading

import pytest

from jobs.job import delivery_ids
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, answer_to, claim, delivery, spec


def test_a_submission_is_a_pending_job_with_spec_and_payload(store: JobStore) -> None:
    job = store.submit(spec("b", "a", labels={"by": "hand"}), payload={"repo": {"é": 1}})
    assert store.get(job.id) == job
    assert (job.id, job.state, job.attempt) == ("j000001", "SCHEDULING", 0)
    assert job.payload == {"repo": {"é": 1}}
    assert job.spec.labels == {"by": "hand"}
    assert not job.has_ended


def test_a_delivery_that_was_absorbed_answers_with_the_job_that_absorbed_it(
    store: JobStore,
) -> None:
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    second = store.submit(spec("c", "b"), delivery=delivery("d2"))
    assert second.id == first.id
    assert answer_to(store, "hub", "d2") == {"job": first.id}
    # … and still does when that job has ended and another one is pending.
    store.finish(claim(store).id, "me", DONE)
    store.submit(spec("d", "c"), delivery=delivery("d3"))
    assert store.submit(spec("c", "b"), delivery=delivery("d2")).id == first.id


def test_a_pending_job_absorbs_the_newer_commit(store: JobStore) -> None:
    store.submit(spec("b", "a", settings={"x": 1}), payload={"n": 1}, delivery=delivery("d1"))
    store.submit(spec("c", "b", settings={"x": 2}), payload={"n": 2}, delivery=delivery("d2"))
    (job,) = store.list()
    assert job.spec.revisions is not None
    assert job.spec.revisions.new_sha is None, "the head, when the job starts"
    assert delivery_ids(job) == ("d1", "d2")
    assert job.spec.settings == {"x": 2}
    assert job.payload == {"n": 2}


def test_a_command_that_failed_is_repeated_although_other_commands_came_later(
    store: JobStore,
) -> None:
    first = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    store.cancel(first.id)
    other = store.submit(spec(pipeline=None), delivery=delivery("d2", "webhook/two"))
    repeated = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    assert repeated.id == "j000003"
    again = store.submit(spec(pipeline=None), delivery=delivery("d1", "webhook/one"))
    assert again.id == "j000003"
    assert other.id == "j000002"


def test_a_running_job_absorbs_nothing(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    running = claim(store)
    pending = store.submit(spec("c", "b"))
    assert pending.id != running.id
    assert store.get(running.id).spec == running.spec
    assert store.claim("me", 60) is None, "one running job per pipeline"
    store.finish(running.id, "me", DONE)
    assert claim(store).id == pending.id


def test_pipelines_and_plain_commands_do_not_wait_for_each_other(store: JobStore) -> None:
    for pipeline in ("faq", "lore", None, None):
        store.submit(spec(pipeline=pipeline))
    assert [claim(store).id for _ in range(4)] == [f"j00000{n}" for n in (1, 2, 3, 4)]


def test_debounce_waits_for_quiet_but_not_for_ever(store: JobStore, clock: Clock) -> None:
    patient = {"debounce_seconds": 2.0, "max_wait_seconds": 5.0}
    store.submit(spec("b", "a", **patient))
    assert store.claim("me", 60) is None
    assert store.seconds_to_next() == 2.0
    for n in range(3):
        clock.now += 1.5
        store.submit(spec(f"c{n}", "b", **patient))
        assert store.claim("me", 60) is None
    assert store.seconds_to_next() == 0.5, "five seconds after the first commit"
    clock.now += 0.5
    claim(store)
    assert store.seconds_to_next() is None


def test_a_delivery_is_named_once_however_often_it_comes(store: JobStore) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d2", "one"))
    store.submit(spec("c", "b"), delivery=delivery("d1", "one"))
    store.submit(spec("c", "b"), delivery=delivery("d2", "other"))
    store.submit(spec("c", "b"), delivery=delivery("d1", "one"))
    (job,) = store.list()
    assert delivery_ids(job) == ("d2", "d1")


@pytest.mark.parametrize("how", ["failed", "cancelled", "is being cancelled"])
def test_a_repeated_delivery_of_a_job_that_did_nothing_makes_the_pipeline_behind_again(
    store: JobStore, how: str
) -> None:
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    if how == "cancelled":
        store.cancel(first.id)
    else:
        store.claim("me", 60)
    if how == "failed":
        store.finish(first.id, "me", FAILED)
    elif how == "is being cancelled":
        store.cancel(first.id)
    again = store.submit(spec("b", "a"), delivery=delivery("d1"))
    assert again.id != first.id and again.state == "SCHEDULING"
    assert answer_to(store, "hub", "d1") == {"job": again.id}
    assert store.submit(spec("b", "a"), delivery=delivery("d1")).id == again.id


def test_a_job_that_completed_before_it_was_stopped_has_done_its_work(store: JobStore) -> None:
    job = store.submit(spec("a"), delivery=delivery("d1"))
    store.claim("me", 60)
    store.cancel(job.id)
    store.finish(job.id, "me", DONE)
    assert store.submit(spec("a"), delivery=delivery("d1")).id == job.id


def test_a_burst_from_many_threads_is_one_pending_job(store: JobStore) -> None:
    def push(thread: int) -> None:
        for n in range(10):
            store.submit(spec(f"{thread}.{n}", "x"), delivery=delivery(f"{thread}.{n}"))

    threads = [threading.Thread(target=push, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (job,) = store.list()
    assert len(set(delivery_ids(job))) == 40
