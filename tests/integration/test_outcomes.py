"""An outcome is told, once: to what counts it, and by the command `on_outcome`."""

import json
import sys
import threading
import time
from pathlib import Path

import pytest

from jobs.errors import StoreError
from jobs.job import Job
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.runner import after_jobs
from pipeline.runner.after_jobs import Outcomes
from pipeline.settings import PipelineSettings, load_settings
from tests.after_jobs_fixtures import end_one, store

__all__ = ["store"]


def pipeline(told: tuple[str, ...]) -> PipelineSettings:
    return PipelineSettings(name="facts", dataset="local/facts", on_outcome=told)


def test_each_outcome_is_told_once_also_by_the_next_process(store: JobStore) -> None:
    told: list[str] = []
    long = store.submit(JobSpec(command=("true",), pipeline="long")).id
    assert store.claim("me", 60) is not None
    ids = [end_one(store).id for _ in range(3)]
    first = Outcomes(store, [lambda job: told.append(job.id)])
    first.poll()
    first.poll()
    assert told == ids
    ids.append(end_one(store).id)
    store.finish(long, "me", None)
    Outcomes(store, [lambda job: told.append(job.id)]).poll()
    assert told == [*ids, long]


def test_what_goes_wrong_while_telling_keeps_nobody_else_from_it(
    store: JobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def breaks(job: Job) -> None:
        raise RuntimeError("no way")

    outcomes = Outcomes(store, [breaks, lambda job: told.append(job.id)])
    outcomes.poll()
    job = end_one(store)
    outcomes.poll()
    assert told == [job.id]
    assert "no way" in caplog.text


def test_the_last_outcome_is_told_before_the_thread_ends(store: JobStore, tmp_path: Path) -> None:
    told: list[str] = []
    outcomes = Outcomes(store, [lambda job: told.append(job.id)])
    outcomes.poll()
    with JobStore.open(tmp_path / "jobs.sqlite") as other:
        job = end_one(other)
    stop = threading.Event()
    stop.set()
    outcomes.follow(stop, lambda: None)
    assert told == [job.id]


def test_the_thread_outlives_an_error(store: JobStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.runner.after_jobs.RETRY_SECONDS", 0.01)
    told: list[str] = []
    outcomes = Outcomes(store, [lambda job: told.append(job.id)])
    outcomes.poll()
    ids = [end_one(store).id]
    errors: list[Exception] = [StoreError("The database is locked."), RuntimeError("no way")]
    poll, stop = outcomes.poll, threading.Event()

    def failing() -> None:
        if errors:
            raise errors.pop()
        stop.set()
        poll()

    monkeypatch.setattr(outcomes, "poll", failing)
    outcomes.follow(stop, lambda: None)
    assert told == ids, "and not twice"


def test_old_jobs_are_removed_again_after_an_error(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.runner.after_jobs.RETRY_SECONDS", 0.01)
    monkeypatch.setattr("pipeline.runner.after_jobs.PRUNE_SECONDS", 0.01)
    told: list[str] = []
    outcomes, stop = Outcomes(store, [lambda job: told.append(job.id)]), threading.Event()
    errors, ids = [RuntimeError("no way")], [end_one(store).id]

    def fails_once() -> None:
        if errors:
            ids.append(end_one(store).id)
            raise errors.pop()
        stop.set()

    outcomes.follow(stop, fails_once)
    assert not errors and told == ids


def test_a_command_gets_the_outcome_on_its_input_and_ids_in_its_environment(
    store: JobStore, tmp_path: Path
) -> None:
    code = (
        "import json, os, sys; "
        "json.dump([json.load(sys.stdin), os.environ['JOB_ID'], os.environ['PIPELINE_OUTCOME']], "
        "open(os.environ['JOB_DIR'] + '/told', 'w'))"
    )
    job = end_one(store)
    after_jobs.notify(pipeline((sys.executable, "-c", code)), job, tmp_path)
    outcome, job_id, result = json.loads((tmp_path / "told").read_text())
    assert (outcome["result"], job_id, result) == ("promoted", job.id, "promoted")


def test_a_program_with_a_relative_path_is_beside_the_settings(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    (tmp_path / "tell.sh").write_text('#!/bin/sh\ncat > "$JOB_DIR/told"\n')
    (tmp_path / "tell.sh").chmod(0o755)
    (tmp_path / "pipeline.toml").write_text(
        '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\non_outcome = ["./tell.sh"]\n'
    )
    after_jobs.notify(load_settings().pipeline("facts"), end_one(store), tmp_path)
    assert json.loads((tmp_path / "told").read_text())["result"] == "promoted"


@pytest.mark.parametrize(
    "told",
    [
        ("there-is-no-such-program",),
        (sys.executable, "-c", "import sys; sys.exit('the list is closed')"),
        ("true", "\x00"),
    ],
)
def test_who_cannot_be_told_is_logged(
    told: tuple[str, ...],
    store: JobStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = end_one(store)
    after_jobs.notify(pipeline(told), job, tmp_path)
    assert f"on_outcome of facts failed for {job.id}" in caplog.text


def test_a_command_that_hangs_is_ended(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(after_jobs, "TIMEOUT_SECONDS", 0.2)
    began = time.monotonic()
    after_jobs.notify(pipeline(("sleep", "60")), end_one(store), tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("wrong", ["http://example.org", 5, []])
def test_what_is_no_command_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="on_outcome"):
        PipelineSettings.model_validate({"name": "a", "dataset": "b/c", "on_outcome": wrong})
