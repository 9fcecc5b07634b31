"""The database under the store: its schema, its faults, and who else has it open."""

import json
import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, event, inspect, text

from jobs.errors import NewerSchema, StoreError
from jobs.job import delivery_ids as delivery_ids_of
from jobs.migrations import HEAD, upgrade
from jobs.schema import METADATA
from jobs.store import JobStore
from tests.jobs_fixtures import delivery, revisions, spec

OLD_JOB = text(
    "INSERT INTO jobs (pipeline, state, spec, created_at, run_after, attempt, num_lost, "
    "cancel_requested) VALUES (:pipeline, :state, :spec, 50, 50, 0, 0, false)"
)
PENDING_JOB = text(
    "INSERT INTO jobs (pipeline, state, spec, payload, created_at, run_after, attempt, num_lost, "
    "cancel_requested) VALUES (:pipeline, :state, :spec, :payload, 50, 50, 0, 0, false)"
)
OLD_LINK = text(
    "INSERT INTO job_deliveries (job_number, delivery_id, arrival, received_at) "
    "VALUES (:job, :id, :arrival, 50)"
)
OLD_DELIVERY = text(
    "INSERT INTO deliveries (source, id, body, received_at, job_number) "
    "VALUES ('hub', :id, '{}', :at, 1)"
)


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
    with pytest.raises(NewerSchema, match=r"'9999'.*Upgrade hotpush"):
        JobStore.open(store_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == "9999"
    engine.dispose()


def test_a_store_of_the_first_schema_is_upgraded_with_all_that_its_jobs_answer_for(
    store_url: str,
) -> None:
    engine = create_engine(store_url)
    with engine.begin() as connection:
        upgrade(connection, "0001")
        for pipeline, state, delivery_ids in (
            ("faq", "ERROR", ("d2", "d1")),
            ("faq", "SCHEDULING", ("d2", "d1", "d0")),
            (None, "RUNNING", None),
        ):
            commits = revisions("b", "a").model_copy(update={"delivery_ids": delivery_ids})
            old = spec(pipeline=pipeline).model_copy(
                update={"revisions": commits if delivery_ids else None}
            )
            values = {"pipeline": pipeline, "state": state, "spec": old.model_dump_json()}
            connection.execute(OLD_JOB, values)
        for id, received_at in (("d2", 20.0), ("d1", 30.0)):
            connection.execute(OLD_DELIVERY, {"id": id, "at": received_at})
    engine.dispose()
    with JobStore.open(store_url) as store:
        plain, pending, failed = store.list()
        assert delivery_ids_of(failed) == ("d2", "d1")
        assert delivery_ids_of(pending) == ("d2", "d1", "d0")
        assert delivery_ids_of(plain) == ()
        waited_since = [store.waited_since(job) for job in (plain, pending, failed)]
        assert waited_since == [50.0, 20.0, 20.0]
        store.submit(spec("c", "b"), delivery=delivery("d3"))
        assert delivery_ids_of(store.get(pending.id)) == ("d2", "d1", "d0", "d3")


def test_pending_jobs_of_the_second_schema_keep_their_place(store_url: str) -> None:
    engine = create_engine(store_url)
    with engine.begin() as connection:
        upgrade(connection, "0002")
        for pipeline, new, webhook_id in (
            ("faq", "x", "by-hand"),
            ("lore", "b", "w1"),
            ("news", "c", "by-hand"),  # a push was absorbed and failed over, so it answers for one
        ):
            values = {
                "pipeline": pipeline,
                "state": "SCHEDULING",
                "spec": spec(new, pipeline=pipeline).model_dump_json(),
                "payload": json.dumps({"webhook": {"id": webhook_id}}),
            }
            connection.execute(PENDING_JOB, values)
        for arrival, (job, id) in enumerate([(2, "d1"), (2, "d2"), (3, "d3")]):
            connection.execute(OLD_LINK, {"job": job, "id": id, "arrival": arrival})
    engine.dispose()
    with JobStore.open(store_url) as store:
        assert [job.by_hand for job in store.list()] == [False, False, True]
        assert store.submit(spec("b", "a"), delivery=delivery("d4")).how == "created"
        assert (
            store.submit(spec("e", "b", pipeline="lore"), delivery=delivery("d5")).how == "merged"
        )
        assert (
            store.submit(spec("f", "c", pipeline="news"), delivery=delivery("d6")).how == "merged"
        )
        assert [job.id for job in store.of_commit("b")] == ["j000004", "j000002"]
        assert [job.id for job in store.of_commit("c")] == ["j000003"]


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
        ("postgresql+psycopg//nobody:secret@h://x", "not a database URL"),
        ("postgresql+psycopg://nobody:secret@127.0.0.1:port/jobs", "port must be a number"),
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


def test_a_store_follows_its_path_to_the_file_that_replaced_its_own(tmp_path: Path) -> None:
    path = tmp_path / "jobs.sqlite"
    with JobStore.open(path) as store:
        assert store.changed() and not store.changed()
        store.submit(spec(pipeline="lost"))
        assert not store.follow_file()
        for file in tmp_path.iterdir():
            file.unlink()
        with JobStore.open(path) as other:
            there = other.submit(spec(pipeline="faq")).job
            assert store.changed() and store.list() == [there]
            here = store.submit(spec(pipeline="other")).job
            assert store.changed(), "the change detector has a connection of its own"
            assert other.list() == [here, there]
        assert store.follow_file() and not store.follow_file()
        for file in tmp_path.iterdir():
            file.unlink()
        assert store.follow_file() and store.list() == [], "it creates the tables"


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"nowhere.*create it first"):
        JobStore.open(tmp_path / "nowhere" / "jobs.db")


def test_a_list_names_the_deliveries_of_its_jobs_whoever_submits_meanwhile(
    store: JobStore, store_url: str
) -> None:
    store.submit(spec("b", "a"), delivery=delivery("d1"))
    with JobStore.open(store_url) as other:

        @event.listens_for(store._engine, "before_cursor_execute")
        def submit_between(*called: object) -> None:
            _, _, statement, *_ = called
            if "job_deliveries" in str(statement) and len(other.list()) == 1:
                other.submit(spec("b", "a", pipeline="another"), delivery=delivery("d2"))

        (listed,) = store.list(limit=1)
        assert len(other.list()) == 2, "it was submitted meanwhile"
    assert delivery_ids_of(listed) == ("d1",)
