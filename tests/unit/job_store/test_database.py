"""The database under the store: its schema, its faults, and who else has it open."""

import threading
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text

from jobs.database import writing
from jobs.errors import OtherSchema, StoreError
from jobs.schema import update_job
from jobs.store import JobStore
from tests.jobs_fixtures import spec, until


@pytest.mark.parametrize("revision", ["0003", "jobs9"], ids=["older", "newer"])
def test_a_store_of_another_version_is_refused_and_left_alone(
    store_url: str, revision: str
) -> None:
    JobStore.open(store_url).close()
    engine = create_engine(store_url)
    with engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = :r"), {"r": revision})
    with pytest.raises(OtherSchema, match=f"'{revision}'.*another version of hotpush wrote"):
        JobStore.open(store_url)
    with engine.connect() as connection:
        assert connection.scalar(text("SELECT version_num FROM alembic_version")) == revision
    engine.dispose()


def test_a_transaction_is_seen_when_it_commits_not_when_it_begins(
    store: JobStore, store_url: str
) -> None:
    job = store.submit(spec("b", "a"))
    with JobStore.open(store_url) as other:
        with writing(other._engine) as connection:
            update_job(connection, job.id, num_lost=1)
            store.has_changed()
            assert not store.has_changed()
        assert until(store.has_changed)
    assert store.get(job.id).num_lost == 1


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://127.0.0.1/jobs", "sqlite:///"),
        ("://", "cannot use the database"),
        ("postgresql+psycopg//nobody:secret@h://x", "cannot use the database"),
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


def test_an_empty_file_becomes_a_database_and_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "jobs.db").touch()
    with JobStore.open(tmp_path / "jobs.db") as store:
        assert store.list() == []
    with pytest.raises(StoreError, match=r"nowhere.*create it first"):
        JobStore.open(tmp_path / "nowhere" / "jobs.db")
