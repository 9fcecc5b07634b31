"""The lines that `pipeline up` prints about jobs."""

from pathlib import Path

import pytest

from jobs.errors import StoreError
from jobs.job import Job
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.journal import Journal


def test_after_an_error_of_the_store_the_next_call_returns_the_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*, limit: int) -> list[Job]:
        raise StoreError("the disk is full")

    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        journal = Journal(store)
        job = store.submit(JobSpec(command=("true",))).job
        with monkeypatch.context() as patched:
            patched.setattr(store, "list", fails)
            with pytest.raises(StoreError):
                journal.news()
        assert journal.news() == [f"{job.id}  true  scheduling"]
        assert journal.news() == []
