"""The states of a job, and who may change them. On SQLite and on Postgres."""

import threading

import pytest

from jobs.errors import JobNotFound, LeaseLost
from jobs.outcome import JobOutcome
from jobs.store import JobStore
from tests.jobs_fixtures import DONE, FAILED, Clock, delivery, lost, spec


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
    job = store.claim("me", 60)
    assert job is not None and job.started_at == clock.now
    clock.now += 7
    ended = store.finish(job.id, "me", outcome)
    assert ended == store.get(job.id)
    assert (ended.state, ended.outcome, ended.ended_at) == (state, outcome, clock.now)
    assert ended.owner is None and ended.has_ended


def test_a_lost_job_is_attempted_again_up_to_its_limit(store: JobStore) -> None:
    store.submit(spec("b", "a", max_attempts=2))
    job = store.claim("me", 60)
    assert job is not None
    store.started(job.id, "me", "pid 7")
    assert store.get(job.id).handle == "pid 7"
    again = store.retry(job.id, "me", lost(job))
    assert (again.state, again.attempt, again.num_lost, again.handle) == ("RUNNING", 2, 1, None)
    ended = store.retry(job.id, "me", lost(job))
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (ended.outcome.stage, ended.outcome.job_id) == ("lost", job.id)
    assert ended.outcome.reason == "Its process vanished. That was failed attempt 2 of 2."


def test_an_attempt_that_a_runner_gave_up_is_no_failed_attempt(store: JobStore) -> None:
    store.submit(spec("b", "a", max_attempts=1))
    job = store.claim("me", 60)
    assert job is not None
    store.release(job.id, "me")
    [again] = store.adopt("you", 60)
    assert (again.attempt, again.num_lost) == (2, 0)
    ended = store.retry(job.id, "you", lost(job))
    assert ended.outcome is not None
    assert ended.outcome.reason == "Its process vanished. That was failed attempt 1 of 1."


def test_a_lost_job_with_a_successor_is_not_attempted_again(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = store.claim("me", 60)
    assert job is not None
    successor = store.submit(spec("c", "b")).job
    ended = store.retry(job.id, "me", lost(job))
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (
        ended.outcome.reason == f"Its process vanished. {successor.id} trains on the newest commit."
    )


def test_an_attempt_that_failed_for_a_cause_that_can_pass_waits(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec("b", "a", max_attempts=2))
    job = store.claim("me", 60)
    assert job is not None
    away = lost(job).model_copy(update={"may_pass": True, "reason": "The hub is away."})
    again = store.retry(job.id, "me", away, 30)
    assert (again.state, again.attempt, again.run_after) == ("RUNNING", 2, clock.now + 30)
    assert store.give_way(job.id, "me", away) == again
    clock.now += 30
    store.started(job.id, "me", "pid 7", waited_seconds=30)
    assert store.get(job.id).started_at == clock.now
    ended = store.retry(job.id, "me", away, 120)
    assert ended.outcome is not None and not ended.outcome.may_pass
    assert ended.outcome.reason == "The hub is away. That was failed attempt 2 of 2."


def test_a_job_that_waits_gives_way_to_newer_commits(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = store.claim("me", 60)
    assert job is not None
    store.retry(job.id, "me", lost(job), 30)
    successor = store.submit(spec("c", "b")).job
    ended = store.give_way(job.id, "me", lost(job))
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (
        ended.outcome.reason == f"Its process vanished. {successor.id} trains on the newest commit."
    )


def test_time_without_a_runner_is_no_run_time(store: JobStore, clock: Clock) -> None:
    store.submit(spec())
    job = store.claim("dead", 10)
    assert job is not None and job.started_at == clock.now
    clock.now += 5
    store.heartbeat(job.id, "dead", 10)
    clock.now += 3600
    (adopted,) = store.adopt("me", 10)
    assert adopted.started_at == clock.now - 5 - 10


def test_a_dead_runners_job_is_adopted_when_its_lease_ends(store: JobStore, clock: Clock) -> None:
    store.submit(spec())
    job = store.claim("dead", 10)
    assert job is not None
    assert store.adopt("me", 10) == []
    clock.now += 9
    assert store.heartbeat(job.id, "dead", 10) is False
    clock.now += 9
    assert store.adopt("me", 10) == []
    clock.now += 1
    (adopted,) = store.adopt("me", 10)
    assert (adopted.id, adopted.owner, adopted.attempt) == (job.id, "me", 2)
    for call in (
        lambda: store.heartbeat(job.id, "dead", 10),
        lambda: store.started(job.id, "dead", "h"),
        lambda: store.finish(job.id, "dead", DONE),
        lambda: store.retry(job.id, "dead", lost(job)),
        lambda: store.release(job.id, "dead"),
    ):
        with pytest.raises(LeaseLost, match=job.id):
            call()
    assert store.finish(job.id, "me", DONE).state == "COMPLETED"
    with pytest.raises(LeaseLost):
        store.finish(job.id, "me", FAILED)


def test_a_runner_that_slept_keeps_a_job_that_nobody_took(store: JobStore, clock: Clock) -> None:
    store.submit(spec())
    job = store.claim("me", 10)
    assert job is not None
    clock.now += 100
    assert store.adopt("me", 10) == [], "its own jobs are no orphans"
    store.heartbeat(job.id, "me", 10)
    assert store.adopt("other", 10) == []


def test_a_runner_adopts_a_job_of_its_own_that_it_does_not_know(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec())
    job = store.claim("me", 10)
    assert job is not None
    assert store.adopt("me", 10, held=()) == []
    clock.now += 10
    assert store.adopt("me", 10, held=(job.id,)) == []
    (adopted,) = store.adopt("me", 10, held=())
    assert (adopted.id, adopted.owner) == (job.id, "me")


def test_a_released_job_is_adopted_at_once(store: JobStore) -> None:
    store.submit(spec())
    job = store.claim("me", 10)
    assert job is not None
    store.started(job.id, "me", "pid 7")
    store.release(job.id, "me")
    (adopted,) = store.adopt("other", 10)
    assert (adopted.id, adopted.attempt, adopted.num_lost) == (job.id, 2, 0)
    assert adopted.handle is None, "the process that it names is gone"


def test_cancel_by_state(store: JobStore) -> None:
    pending = store.submit(spec("b", "a"), delivery=delivery("d1")).job
    cancelled = store.cancel(pending.id)
    assert cancelled.state == "CANCELED" and cancelled.outcome is not None
    assert cancelled.outcome.delivery_ids == ("d1",)
    assert store.claim("me", 60) is None
    store.submit(spec())
    running = store.claim("me", 60)
    assert running is not None
    assert store.cancel(running.id).state == "RUNNING"
    assert store.heartbeat(running.id, "me", 60) is True
    ended = store.finish(running.id, "me", JobOutcome(result="cancelled"))
    assert store.cancel(running.id) == ended


@pytest.mark.parametrize(
    "job_id",
    [
        "j000009",
        "j9",
        "x",
        "",
        "j-00001",
        "j\u0660\u0660\u0660\u0660\u0660\u0661",
        "000001",
        "j9999999999",
        "j99999999999999999999",
        pytest.param("j" + "9" * 5000, id="too-long"),
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
    assert store.changed()
    assert not store.changed()
    store.submit(spec())
    assert store.changed()
    assert not store.changed()
    with JobStore.open(store_url) as other:
        other.submit(spec(pipeline="lore"))
    assert store.changed()


def test_jobs_that_ended_are_found_by_when_they_did(store: JobStore, clock: Clock) -> None:
    ids: list[str] = []
    for number, seconds in enumerate((0, 5, 5)):
        job = store.submit(spec(f"{number}")).job
        clock.now += seconds
        store.claim("me", 60)
        store.finish(job.id, "me", DONE)
        ids.append(job.id)
    store.submit(spec("runs"))
    began = clock.now - 10
    assert [job.id for job in store.unhandled()] == ids
    store.handled(ids[1])
    assert [job.id for job in store.unhandled()] == [ids[0], ids[2]]
    assert store.ids_ended_before(clock.now) == ids[:2]
    assert store.ids_ended_before(began) == []


def test_two_runners_never_claim_the_same_job(store: JobStore) -> None:
    for n in range(20):
        store.submit(spec(pipeline=f"p{n}"))
    claimed: list[str] = []

    def claim(owner: str) -> None:
        while (job := store.claim(owner, 60)) is not None:
            claimed.append(job.id)

    threads = [threading.Thread(target=claim, args=(f"r{n}",)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(claimed) == [f"j{n:06d}" for n in range(1, 21)]
