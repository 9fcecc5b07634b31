"""The states of a job, and who may change them. On SQLite and on Postgres."""

import threading
from collections.abc import Callable

import pytest
from sqlalchemy import create_engine, text

from jobs.errors import JobNotFound, LeaseLost, StoreError
from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, claim, delivery, lost, spec, until


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (None, "COMPLETED"),
        *[(JobOutcome(result=r), "COMPLETED") for r in ("promoted", "published", "rejected")],
        *[(JobOutcome(result=r), "COMPLETED") for r in ("unchanged", "superseded")],
        (FAILED, "ERROR"),
        (JobOutcome(result="cancelled"), "CANCELED"),
    ],
)
def test_the_outcome_says_the_state(
    store: JobStore, clock: Clock, outcome: JobOutcome | None, state: str
) -> None:
    store.submit(spec())
    job = claim(store)
    assert job.started_at == clock.now
    clock.now += 7
    ended = store.finish(job.id, "me", outcome)
    assert ended == store.get(job.id)
    assert (ended.state, ended.outcome, ended.ended_at) == (state, outcome, clock.now)
    assert ended.owner is None and ended.has_ended


def test_a_lost_job_is_attempted_again_up_to_its_limit(store: JobStore) -> None:
    store.submit(spec("b", "a", max_attempts=2))
    job = claim(store)
    assert store.started(job.id, "me", "pid 7").handle == "pid 7"
    waits = store.retry(job.id, "me", lost(job))
    assert (waits.state, waits.attempt, waits.num_lost) == ("RUNNING", 2, 1)
    assert (waits.owner, waits.handle, waits.outcome) == (None, None, None)
    assert waits.last_failure == lost(job)
    again = claim(store, "you")
    assert (again.id, again.attempt, again.last_failure) == (job.id, 2, None)
    ended = store.retry(job.id, "you", lost(job))
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (ended.outcome.stage, ended.outcome.job_id) == ("lost", job.id)
    assert ended.outcome.reason == "Its process vanished. That was failed attempt 2 of 2."


def test_an_attempt_begins_once(store: JobStore) -> None:
    store.submit(spec())
    job = claim(store)
    for _ in range(2):  # the first answer was lost
        store.started(job.id, "me", "pid 7")
    with pytest.raises(LeaseLost):
        store.started(job.id, "me", "pid 8")
    with pytest.raises(LeaseLost):
        store.hand_back(job.id, "me", only_unbegun=True)
    assert store.get(job.id).handle == "pid 7"


def test_an_attempt_that_a_runner_gave_up_is_no_failed_attempt(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec("b", "a", max_attempts=1))
    job = claim(store)
    store.started(job.id, "me", "pid 7")
    clock.now += 5
    store.hand_back(job.id, "me")
    clock.now += 3600
    assert store.seconds_to_next() == 0
    again = claim(store, "you")
    assert (again.id, again.attempt, again.num_lost, again.handle) == (job.id, 2, 0, None)
    assert again.started_at == clock.now - 5, "time without an agent is no run time"
    ended = store.retry(job.id, "you", lost(job))
    assert ended.outcome is not None
    assert ended.outcome.reason == "Its process vanished. That was failed attempt 1 of 1."


def test_time_after_a_lease_ran_out_is_no_run_time(store: JobStore, clock: Clock) -> None:
    store.submit(spec())
    job = claim(store, "dead", 10)
    clock.now += 5
    store.heartbeat(job.id, "dead", 10)
    clock.now += 3600
    store.hand_back(job.id, "dead")
    assert claim(store).started_at == clock.now - 5 - 10


def test_time_in_an_engines_queue_is_no_run_time(store: JobStore, clock: Clock) -> None:
    store.submit(spec(launcher="slurm"))
    assert store.claim("local", 10, is_local=True) is None
    job = store.claim("slurm", 10, is_local=False)
    assert job is not None and job.started_at is not None
    clock.now += 100
    now = store.heartbeat(job.id, "slurm", 10, is_queued=True)
    assert (now.started_at, now.lease_until) == (job.started_at + 100, clock() + 10)


def test_a_lost_job_with_a_successor_is_not_attempted_again(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = claim(store)
    successor = store.submit(spec("c", "b"))
    ended = store.retry(job.id, "me", lost(job))
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (
        ended.outcome.reason == f"Its process vanished. {successor.id} trains on the newest commit."
    )


def test_an_attempt_that_failed_for_a_cause_that_can_pass_waits(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec("b", "a", max_attempts=2))
    job = claim(store)
    away = lost(job).model_copy(update={"may_pass": True, "reason": "The hub is away."})
    waits = store.retry(job.id, "me", away, 30)
    assert (waits.state, waits.attempt, waits.run_after) == ("RUNNING", 2, clock.now + 30)
    assert "attempt 1 failed" in str(waits.waits_for) and "hub is away" in str(waits.waits_for)
    assert store.claim("me", 60) is None and store.seconds_to_next() == 30
    assert store.has_open_jobs()
    clock.now += 30
    assert claim(store).started_at == clock.now
    ended = store.retry(job.id, "me", away, 120)
    assert ended.outcome is not None and not ended.outcome.may_pass
    assert ended.outcome.reason == "The hub is away. That was failed attempt 2 of 2."


def test_a_job_that_waits_gives_way_to_newer_commits(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = claim(store)
    store.retry(job.id, "me", lost(job), 30)
    successor = store.submit(spec("c", "b"))
    ended = store.claim("me", 60)
    assert ended is not None and (ended.id, ended.state) == (job.id, "ERROR")
    assert ended.outcome is not None
    assert (
        ended.outcome.reason == f"Its process vanished. {successor.id} trains on the newest commit."
    )
    assert claim(store).id == successor.id


def test_a_job_whose_runner_was_stopped_does_not_give_way(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = claim(store)
    store.hand_back(job.id, "me")
    store.submit(spec("c", "b"))
    assert claim(store).id == job.id


@pytest.mark.parametrize("failed", [True, False])
def test_a_job_that_waits_can_be_cancelled(store: JobStore, failed: bool) -> None:
    store.submit(spec())
    job = claim(store)
    if failed:
        store.retry(job.id, "me", lost(job), 30)
    else:
        store.hand_back(job.id, "me")
    ended = store.cancel(job.id)
    assert ended.state == "CANCELED" and ended.outcome is not None
    assert ("Its process vanished." in str(ended.outcome.reason)) == failed


@pytest.mark.parametrize("end", [JobStore.hand_back, lambda *call: JobStore.retry(*call, FAILED)])
def test_a_job_that_was_to_be_cancelled_gets_no_other_attempt(
    store: JobStore, end: Callable[[JobStore, str, str], Job]
) -> None:
    store.submit(spec())
    job = claim(store)
    store.cancel(job.id)
    assert end(store, job.id, "me").state == "CANCELED"


def test_a_lease_that_ran_out_is_found_and_only_its_owner_may_use_it(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec())
    job = claim(store, "dead", 10)
    clock.now += 9
    store.heartbeat(job.id, "dead", 10)
    clock.now += 9
    assert store.expired() == []
    clock.now += 1
    (expired,) = store.expired()
    assert (expired.id, expired.owner, expired.attempt) == (job.id, "dead", 1)
    store.heartbeat(job.id, "dead", 10)
    assert store.expired() == [], "its agent was only late"
    clock.now += 10
    store.hand_back(job.id, "dead")
    assert store.expired() == []
    assert claim(store, "me").attempt == 2
    for call in (
        lambda: store.heartbeat(job.id, "dead", 10),
        lambda: store.started(job.id, "dead", "h"),
        lambda: store.finish(job.id, "dead", DONE),
        lambda: store.retry(job.id, "dead", lost(job)),
        lambda: store.hand_back(job.id, "dead"),
    ):
        with pytest.raises(LeaseLost, match=job.id):
            call()
    assert store.finish(job.id, "me", DONE).state == "COMPLETED"
    with pytest.raises(LeaseLost):
        store.finish(job.id, "me", FAILED)


def test_cancel_by_state(store: JobStore) -> None:
    pending = store.submit(spec("b", "a"), delivery=delivery("d1"))
    cancelled = store.cancel(pending.id)
    assert cancelled.state == "CANCELED" and cancelled.outcome is not None
    assert cancelled.outcome.delivery_ids == ("d1",)
    assert store.claim("me", 60) is None
    store.submit(spec())
    running = claim(store)
    assert store.cancel(running.id).state == "RUNNING"
    assert store.heartbeat(running.id, "me", 60).cancel_requested
    ended = store.finish(running.id, "me", JobOutcome(result="cancelled"))
    assert store.cancel(running.id) == ended


@pytest.mark.parametrize(
    "job_id",
    [
        "j000009",
        "j9",
        "",
        "j9999999999",
    ],
)
def test_an_unknown_job_is_named(store: JobStore, job_id: str) -> None:
    store.submit(spec())
    for call in (store.get, store.cancel):
        with pytest.raises(JobNotFound) as caught:
            call(job_id)
        assert repr(job_id) in str(caught.value)


def test_listing_is_newest_first_and_filtered(store: JobStore) -> None:
    for pipeline in ("faq", "lore", "art"):
        store.submit(spec(pipeline=pipeline))
    store.claim("me", 60)
    assert [job.id for job in store.list()] == ["j000003", "j000002", "j000001"]
    assert [job.id for job in store.list(limit=1)] == ["j000003"]
    assert [job.id for job in store.list(pipeline="lore")] == ["j000002"]
    assert [job.id for job in store.list(state="RUNNING")] == ["j000001"]


def test_changes_are_seen_and_silence_too(store: JobStore, store_url: str) -> None:
    assert store.has_changed() and not store.has_changed()
    store.submit(spec())
    assert until(store.has_changed) and not store.has_changed()
    with JobStore.open(store_url) as other:
        other.submit(spec(pipeline="lore"))
    assert until(store.has_changed) and not store.has_changed()


def test_a_lost_watch_is_an_error_once_and_then_a_change(store: JobStore, store_url: str) -> None:
    if store_url.startswith("sqlite"):
        pytest.skip("a file has no connection that can be lost")
    assert store.has_changed() and not store.has_changed()
    engine = create_engine(store_url, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        listens = "FROM pg_stat_activity WHERE query = 'LISTEN hotpush'"
        connection.execute(text(f"SELECT pg_terminate_backend(pid) {listens}"))
    engine.dispose()
    with pytest.raises(StoreError, match="failed"):
        until(store.has_changed)
    assert store.has_changed() and not store.has_changed()
    store.submit(spec())
    assert until(store.has_changed)


def test_jobs_that_ended_are_found_by_when_they_did(store: JobStore, clock: Clock) -> None:
    ids: list[str] = []
    for number, seconds in enumerate((0, 5, 5)):
        job = store.submit(spec(f"{number}"))
        clock.now += seconds
        store.claim("me", 60)
        store.finish(job.id, "me", DONE)
        ids.append(job.id)
    store.submit(spec("runs"))
    began, ended = clock.now - 10, clock.now
    assert [job.id for job in store.unhandled()] == ids
    store.handled(ids[1])
    assert store.take_outcome(ids[0], 5) and not store.take_outcome(ids[0], 5)
    assert [job.id for job in store.unhandled()] == [ids[2]]
    clock.now += 5
    assert [job.id for job in store.unhandled()] == [ids[0], ids[2]]
    assert store.ids_ended_before(ended) == ids[:2]
    assert store.ids_ended_before(began) == []


def test_runners_never_claim_the_same_attempt(store: JobStore) -> None:
    jobs = [store.submit(spec(pipeline=f"p{n}")).id for n in range(20)]

    def claimed() -> list[str]:
        found: list[str] = []

        def claim_all(owner: str) -> None:
            while (job := store.claim(owner, 60)) is not None:
                found.append(job.id)

        threads = [threading.Thread(target=claim_all, args=(f"r{n}",)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(found)

    assert claimed() == jobs, "the first attempts"
    for job in store.list():
        store.hand_back(job.id, str(job.owner))
    assert claimed() == jobs, "the next ones"
