"""The store, on SQLite and on Postgres: one suite for both."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, inspect, text

from jobs.errors import JobNotFound, LeaseLost, NewerSchema, PendingJob, StoreError
from jobs.migrations import HEAD
from jobs.outcome import JobOutcome
from jobs.schema import METADATA
from jobs.store import Delivery, JobStore
from tests.jobs_fixtures import Clock, clock, postgres_server, spec, store, store_url

__all__ = ["clock", "postgres_server", "store", "store_url"]

DONE = JobOutcome(result="promoted")
FAILED = JobOutcome(result="failed", stage="train", reason="The loss is NaN.", exit_code=1)


def delivery(id: str, source: str = "hub") -> Delivery:
    return Delivery(source=source, id=id, body="{}")


def test_a_submission_is_a_pending_job_with_spec_and_payload(store: JobStore) -> None:
    submitted = store.submit(spec("b", "a", labels={"by": "hand"}), payload={"repo": {"é": 1}})
    assert submitted.is_new and submitted.how == "created"
    job = store.get(submitted.job.id)
    assert job == submitted.job
    assert (job.id, job.state, job.attempt) == ("j000001", "SCHEDULING", 0)
    assert job.payload == {"repo": {"é": 1}}
    assert job.spec.labels == {"by": "hand"}
    assert not job.has_ended


def test_a_delivery_is_answered_once(store: JobStore) -> None:
    assert store.answer_to("hub", "d1") is None
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    again = store.submit(spec("b", "a"), delivery=delivery("d1"))
    assert (again.job.id, again.is_new, again.how) == (first.job.id, False, "duplicate")
    assert store.answer_to("hub", "d1") == {"job": first.job.id}
    assert store.answer_to("another source", "d1") is None
    assert len(store.list()) == 1


def test_a_delivery_that_was_absorbed_answers_with_the_job_that_absorbed_it(
    store: JobStore,
) -> None:
    first = store.submit(spec("b", "a"), delivery=delivery("d1"))
    second = store.submit(spec("c", "b"), delivery=delivery("d2"))
    assert (second.job.id, second.how, second.is_new) == (first.job.id, "merged", False)
    assert store.answer_to("hub", "d2") == {"job": first.job.id}
    # … and still does when that job has ended and another one is pending.
    job = store.claim("me", 60)
    assert job is not None
    store.finish(job.id, "me", DONE)
    store.submit(spec("d", "c"), delivery=delivery("d3"))
    assert store.submit(spec("c", "b"), delivery=delivery("d2")).job.id == first.job.id


def test_jobs_that_ended_are_found_by_when_they_did(store: JobStore, clock: Clock) -> None:
    ids = []
    for number, seconds in enumerate((0, 5, 5)):
        job = store.submit(spec(f"{number}")).job
        clock.now += seconds
        store.claim("me", 60)
        store.finish(job.id, "me", DONE)
        ids.append(job.id)
    store.submit(spec("runs"))
    began = clock.now - 10
    assert [job.id for job in store.list_ended(began, among=100)] == ids
    assert [job.id for job in store.list_ended(began + 5, among=100)] == ids[1:]
    assert [job.id for job in store.list_ended(began, among=2)] == ids[2:]
    assert store.list_ended(clock.now + 1, among=100) == []
    assert store.ids_ended_before(clock.now) == ids[:2]
    assert store.ids_ended_before(began) == []


def test_an_ignored_delivery_is_remembered_with_its_reason(store: JobStore) -> None:
    store.ignore(delivery("d1"), "A tag is not trained on.")
    store.ignore(delivery("d1"), "another reason")
    assert store.answer_to("hub", "d1") == {"ignored": "A tag is not trained on."}
    assert store.list() == []


def test_an_ignored_delivery_can_be_replayed_into_a_job_but_not_back(store: JobStore) -> None:
    store.ignore(delivery("d1"), "No pipeline watches acme/faq.")
    job = store.submit(spec("b"), delivery=delivery("d1")).job
    store.ignore(delivery("d1"), "No pipeline watches acme/faq.")
    assert store.answer_to("hub", "d1") == {"job": job.id}


def test_a_pending_job_absorbs_the_newer_commit(store: JobStore) -> None:
    store.submit(spec("b", "a", settings={"x": 1}), payload={"n": 1}, delivery=delivery("d1"))
    store.submit(spec("c", "b", settings={"x": 2}), payload={"n": 2}, delivery=delivery("d2"))
    (job,) = store.list()
    assert job.spec.revisions is not None
    assert (job.spec.revisions.old_sha, job.spec.revisions.new_sha) == ("a", "c")
    assert job.spec.revisions.delivery_ids == ("d1", "d2")
    assert job.spec.settings == {"x": 2}
    assert job.payload == {"n": 2}


def test_commits_that_arrive_in_the_wrong_order_keep_their_newest_end(store: JobStore) -> None:
    later = spec(new="c" * 40, old="b" * 40, settings={"of": "c"})
    earlier = spec(new="b" * 40, old="a" * 40, settings={"of": "b"})
    store.submit(later, payload={"of": "c"})
    job = store.submit(earlier, payload={"of": "b"}).job
    assert job.spec.revisions is not None
    assert (job.spec.revisions.old_sha, job.spec.revisions.new_sha) == ("a" * 40, "c" * 40)
    assert (job.spec.settings, job.payload) == ({"of": "c"}, {"of": "c"})


def test_going_back_and_forth_ends_with_what_came_last(store: JobStore) -> None:
    store.submit(spec(new="b" * 40, old="a" * 40))
    job = store.submit(spec(new="a" * 40, old="b" * 40)).job
    assert job.spec.revisions is not None
    assert job.spec.revisions.new_sha == "a" * 40


def test_a_job_that_was_not_to_join_leaves_the_pending_one_alone(store: JobStore) -> None:
    pending = store.submit(spec(new="b" * 40)).job
    with pytest.raises(PendingJob, match=pending.id):
        store.submit(spec(new="a" * 40), joins=False)
    assert store.get(pending.id) == pending


def test_a_running_job_absorbs_nothing(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    running = store.claim("me", 60)
    assert running is not None
    pending = store.submit(spec("c", "b")).job
    assert pending.id != running.id
    assert store.get(running.id).spec == running.spec
    assert store.claim("me", 60) is None, "one running job per pipeline"
    store.finish(running.id, "me", DONE)
    assert (claimed := store.claim("me", 60)) is not None and claimed.id == pending.id


def test_pipelines_and_plain_commands_do_not_wait_for_each_other(store: JobStore) -> None:
    for pipeline in ("faq", "lore", None, None):
        assert store.submit(spec(pipeline=pipeline)).is_new
    assert [job.id for _ in range(4) if (job := store.claim("me", 60))] == [
        f"j00000{n}" for n in (1, 2, 3, 4)
    ]


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
    assert store.claim("me", 60) is not None
    assert store.seconds_to_next() is None


def test_a_dedupe_key_gives_the_latest_job_back(store: JobStore) -> None:
    first = store.submit(spec("b", "a", dedupe_key="main@b"), delivery=delivery("d1")).job
    again = store.submit(spec("b", "a", dedupe_key="main@b"), delivery=delivery("d2"))
    assert (again.how, again.job.id) == ("duplicate", first.id)
    assert again.job.spec.revisions is not None
    assert again.job.spec.revisions.delivery_ids == ("d1", "d2")
    assert store.answer_to("hub", "d2") == {"job": first.id}
    running = store.claim("me", 60)
    assert running is not None
    assert store.submit(spec("b", dedupe_key="main@b"), delivery=delivery("d3")).job == running
    store.finish(running.id, "me", DONE)
    assert store.submit(spec("b", dedupe_key="main@b")).job.id == first.id


def test_a_dedupe_key_of_a_failed_job_is_free_again(store: JobStore) -> None:
    first = store.submit(spec("b", dedupe_key="main@b")).job
    store.claim("me", 60)
    store.finish(first.id, "me", FAILED)
    assert store.submit(spec("b", dedupe_key="main@b")).is_new


def test_a_force_push_there_and_back_trains_again(store: JobStore) -> None:
    for sha in ("a", "b", "a"):
        assert store.submit(spec(sha, dedupe_key=f"main@{sha}")).is_new
        job = store.claim("me", 60)
        assert job is not None
        store.finish(job.id, "me", DONE)


def test_the_key_of_a_pending_job_is_that_of_its_newest_commit(store: JobStore) -> None:
    store.submit(spec("a", dedupe_key="main@a"))
    store.submit(spec("b", dedupe_key="main@b"))
    assert store.submit(spec("b", dedupe_key="main@b")).how == "duplicate"
    assert store.submit(spec("a", dedupe_key="main@a")).how == "merged"
    (job,) = store.list()
    assert job.spec.revisions is not None and job.spec.revisions.new_sha == "a"


def test_a_plain_command_has_its_dedupe_key_to_itself(store: JobStore) -> None:
    first = store.submit(spec(pipeline=None, dedupe_key="k")).job
    assert store.submit(spec(pipeline=None, dedupe_key="other")).is_new
    assert store.submit(spec(pipeline=None, dedupe_key="k")).job.id == first.id


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


def test_a_failed_job_hands_its_range_to_its_successor(store: JobStore) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d1"))
    first = store.claim("me", 60)
    assert first is not None
    store.submit(spec("c", "b"), delivery=delivery("d2"))
    store.finish(first.id, "me", FAILED)
    second = store.claim("me", 60)
    assert second is not None and second.spec.revisions is not None
    assert (second.spec.revisions.old_sha, second.spec.revisions.new_sha) == ("a", "c")
    assert second.spec.revisions.delivery_ids == ("d1", "d2")


def test_a_successor_has_waited_since_the_commit_that_a_job_failed_over(
    store: JobStore, clock: Clock
) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d1"))
    received_at = clock.now
    first = store.claim("me", 60)
    assert first is not None
    clock.now += 30
    store.submit(spec("c", "b"), delivery=delivery("d2"))
    store.finish(first.id, "me", FAILED)
    clock.now += 5
    second = store.claim("me", 60)
    assert second is not None and second.created_at == received_at + 30
    assert store.waited_since(second) == store.waited_since(first) == received_at
    by_hand = store.submit(spec(pipeline="other")).job
    assert store.waited_since(by_hand) == by_hand.created_at == clock.now


def test_a_lost_job_is_attempted_again_up_to_its_limit(store: JobStore) -> None:
    store.submit(spec("b", "a", max_attempts=2))
    job = store.claim("me", 60)
    assert job is not None
    store.started(job.id, "me", "pid 7")
    assert store.get(job.id).handle == "pid 7"
    again = store.retry(job.id, "me", "Its process vanished.")
    assert (again.state, again.attempt, again.num_lost, again.handle) == ("RUNNING", 2, 1, None)
    ended = store.retry(job.id, "me", "Its process vanished.")
    assert ended.state == "ERROR" and ended.outcome is not None
    assert (ended.outcome.stage, ended.outcome.job_id) == ("lost", job.id)
    assert ended.outcome.reason == "Its process vanished. That was attempt 2 of 2."


def test_a_lost_job_with_a_successor_is_not_attempted_again(store: JobStore) -> None:
    store.submit(spec("b", "a"))
    job = store.claim("me", 60)
    assert job is not None
    successor = store.submit(spec("c", "b")).job
    ended = store.retry(job.id, "me", "Its process vanished.")
    assert ended.state == "ERROR" and ended.outcome is not None
    assert ended.outcome.reason == f"Its process vanished. {successor.id} takes over its commits."
    joined = store.get(successor.id).spec.revisions
    assert joined is not None and (joined.old_sha, joined.new_sha) == ("a", "c")


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
    assert (adopted.id, adopted.owner, adopted.attempt) == (job.id, "me", 1)
    for call in (
        lambda: store.heartbeat(job.id, "dead", 10),
        lambda: store.started(job.id, "dead", "h"),
        lambda: store.finish(job.id, "dead", DONE),
        lambda: store.retry(job.id, "dead", "gone"),
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
    assert job.spec.revisions is not None
    assert len(set(job.spec.revisions.delivery_ids)) == 40


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


def test_the_migrations_build_what_the_code_declares(store: JobStore, store_url: str) -> None:
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    engine = create_engine(store_url)
    with engine.connect() as connection:
        assert compare_metadata(MigrationContext.configure(connection), METADATA) == []
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == HEAD
    engine.dispose()


def test_the_database_itself_refuses_a_second_pending_job(store: JobStore, store_url: str) -> None:
    store.submit(spec())
    engine = create_engine(store_url)
    names = {index["name"] for index in inspect(engine).get_indexes("jobs")}
    engine.dispose()
    assert {"one_pending_job_per_pipeline", "one_running_job_per_pipeline"} <= names


def test_a_newer_schema_is_refused_and_left_alone(store_url: str) -> None:
    JobStore.open(store_url).close()
    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(NewerSchema, match=r"'9999'.*upgrade hotpush"):
        JobStore.open(store_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    engine.dispose()


def test_a_store_is_opened_by_many_at_once(store_url: str) -> None:
    stores: list[JobStore] = []
    threads = [
        threading.Thread(target=lambda: stores.append(JobStore.open(store_url))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(stores) == 4
    for opened in stores:
        opened.close()


def test_jobs_outlive_the_store_that_took_them(store_url: str) -> None:
    with JobStore.open(store_url) as first:
        job = first.submit(spec("b", "a"), payload={"n": 1}).job
    with JobStore.open(store_url) as second:
        assert second.get(job.id) == job


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://127.0.0.1/jobs", "sqlite:///"),
        ("://", "not a database URL"),
        ("postgresql+psycopg://nobody:secret@127.0.0.1:1/jobs", "can be reached"),
    ],
)
def test_a_database_that_cannot_be_used_is_named(url: str, message: str) -> None:
    with pytest.raises(StoreError, match=message) as caught:
        JobStore.open(url)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database " * 100)
    before = path.read_bytes()
    with pytest.raises(StoreError, match=r"notes\.txt.*not a database"):
        JobStore.open(path)
    assert path.read_bytes() == before


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*create it first"):
        JobStore.open(tmp_path / "nowhere" / "jobs.db")
