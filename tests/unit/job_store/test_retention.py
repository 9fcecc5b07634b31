"""What the store forgets, on both databases: old jobs that ended, with their deliveries."""

import pytest

from jobs.errors import JobNotFound
from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.queue import KEPT_SECONDS
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, answer_to, claim, delivery, spec


def end(store: JobStore, number: int, outcome: JobOutcome = DONE, **values: object) -> Job:
    """A job of the delivery `d<number>` that has ended."""
    store.submit(spec(f"{number}", **values), delivery=delivery(f"d{number}"))
    return store.finish(claim(store).id, "me", outcome)


def test_old_jobs_that_ended_go_with_their_deliveries(store: JobStore, clock: Clock) -> None:
    old = [end(store, number, outcome).id for number, outcome in enumerate((DONE, FAILED, DONE))]
    clock.now += 100
    before = clock.now
    clock.now += 100
    young = end(store, 3).id
    assert store.forget(before, kept={old[0]}) == old[1:]
    assert [job.id for job in store.list()] == [young, old[0]]
    for job_id in old[1:]:
        with pytest.raises(JobNotFound):
            store.get(job_id)
    assert [answer_to(store, "hub", f"d{number}") for number in range(4)] == [
        {"job": old[0]},
        None,
        None,
        {"job": young},
    ]
    assert store.of_commit("2") == []
    # A forgotten delivery is new; one that is remembered gets its answer, and no number is reused.
    assert store.submit(spec("0"), delivery=delivery("d0")).id == old[0]
    again = store.submit(spec("2"), delivery=delivery("d2"))
    assert again.id > young
    # Another machine does not know who keeps it.
    assert store.forget(before) == []
    clock.now += KEPT_SECONDS
    assert store.forget(before) == [old[0]]


def test_what_waits_and_what_runs_stays_however_old(store: JobStore, clock: Clock) -> None:
    lost = end(store, 0, FAILED).id
    store.submit(spec("1"), delivery=delivery("d1"))
    runs = claim(store, lease_seconds=1e9)
    waits = store.submit(spec("2", "1"), delivery=delivery("d2"))
    clock.now += 1e6
    assert store.forget(clock.now) == [lost]
    assert {job.id: job.state for job in store.list()} == {
        runs.id: "RUNNING",
        waits.id: "SCHEDULING",
    }
    assert answer_to(store, "hub", "d1") == {"job": runs.id}
    # What ended lately stays too, although it began long ago.
    store.finish(runs.id, "me", DONE)
    clock.now += 1
    assert store.forget(clock.now - 10) == []


def test_the_id_of_a_deleted_job_is_not_used_again(store: JobStore, clock: Clock) -> None:
    newest = end(store, 0).id
    clock.now += 1
    assert store.forget(clock.now) == [newest]
    assert store.submit(spec("1")).id > newest
