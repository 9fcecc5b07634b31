"""Rollback goes back and stays back: what is trained next starts from what is served then."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain import run
from pipeline.retrain.job import MetricsWriter, RetrainJob
from pipeline.retrain.settings import RetrainSettings
from serving.errors import Superseded
from serving.weights.release_store import (
    clear_pending,
    load_release,
    pending_release,
    release_ids,
    set_pending,
)
from tests.retrain_fixtures import (
    Pipeline,
    of_places,
    on_its_second_release,
    serve,
    tiny_preset,
    two_releases,
)

__all__ = ["on_its_second_release", "tiny_preset", "two_releases"]


@pytest.mark.parametrize(
    "go_back",
    [
        pytest.param(serve, id="server up"),
        pytest.param(set_pending, id="no server", marks=pytest.mark.slow),
    ],
)
def test_the_next_commit_trains_from_what_was_gone_back_to(
    on_its_second_release: Pipeline, go_back: Callable[[Path, str], None]
) -> None:
    pipeline = on_its_second_release
    releases = release_ids(pipeline.dir)
    first, second = (load_release(pipeline.dir / release).lineage for release in releases)
    assert second.parent == releases[0]

    go_back(pipeline.dir, releases[0])
    third = pipeline.learn(of_places(8))
    assert third.result == "published", third.reason
    lineage = load_release(pipeline.dir / str(third.release)).lineage
    assert (lineage.mode, lineage.parent) == ("delta", releases[0])
    # The rows of the commit that was gone back from are new again: nothing pushed is lost.
    assert lineage.dataset_base_revision == first.dataset_revision
    evaluation = json.loads((pipeline.home / "jobs/job-2/evaluation.json").read_text())
    assert evaluation["against"] == releases[0]
    assert pending_release(pipeline.dir) == third.release


@pytest.mark.parametrize(
    "stage",
    [
        "train",
        pytest.param("evaluate", marks=pytest.mark.slow),
        pytest.param("export", marks=pytest.mark.slow),
        pytest.param("promote", marks=pytest.mark.slow),
    ],
)
def test_a_running_job_begins_again_from_what_was_gone_back_to(
    on_its_second_release: Pipeline, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    pipeline = on_its_second_release
    first, _ = release_ids(pipeline.dir)
    revision = pipeline.commit(of_places(8))
    # There is no hub to ask again.
    monkeypatch.setattr(run, "take_snapshot", lambda *_: pipeline.snapshot(revision))
    begun: list[str] = []

    def write(metrics: MetricsWriter, at: str, event: str, **values: object) -> None:
        if event == "start":
            begun.append(at)
            if begun.count(stage) == 1 and at == stage:
                serve(pipeline.dir, first)
        written(metrics, at, event, **values)

    written: Callable[..., None] = MetricsWriter.write
    monkeypatch.setattr(MetricsWriter, "write", write)
    outcome = pipeline.run(pipeline.job(revision))

    assert outcome.result == "published", outcome.reason
    assert begun.count("snapshot") == 2
    lineage = load_release(pipeline.dir / str(outcome.release)).lineage
    assert (lineage.mode, lineage.parent) == ("delta", first)
    assert outcome.parent_release == first
    evaluation = json.loads((pipeline.home / "jobs/job-2/evaluation.json").read_text())
    assert evaluation["against"] == first
    assert pending_release(pipeline.dir) == outcome.release


def test_an_outcome_tells_nothing_of_what_was_before_the_job_began_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = RetrainJob.of({}, tmp_path, RetrainSettings(**Pipeline(tmp_path).settings), None)
    told: list[JobOutcome] = []

    def retrain(job: RetrainJob) -> JobOutcome:
        told.append(job.outcome("unchanged"))
        if len(told) == 1:
            job.record_progress(release="r000003-0123abcd", parent_release="r000002-0123abcd")
            raise Superseded("r000003-0123abcd", None)
        return told[-1]

    monkeypatch.setattr(run, "_retrain", retrain)
    monkeypatch.setattr(run, "_clear_away", lambda _: None)
    run.retrain(job)
    assert told[0] == told[1]


def test_a_release_from_before_it_began_again_is_not_promoted_after_a_kill(
    on_its_second_release: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = on_its_second_release
    first, _ = release_ids(pipeline.dir)
    revision = pipeline.commit(of_places(8))
    folder = pipeline.job(revision)
    stale = pipeline.run(folder).release
    clear_pending(pipeline.dir, str(stale))
    # Killed before it promoted; somebody went back; killed again once it had begun again.
    serve(pipeline.dir, first)
    (folder / "outcome.json").unlink()
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run, "take_snapshot", lambda *_: pipeline.snapshot(revision))
        patched.setattr(run, "_learn", _killed)
        pipeline.run(folder)
    outcome = pipeline.run(folder)
    assert outcome.release not in (stale, None)
    assert load_release(pipeline.dir / str(outcome.release)).lineage.parent == first


def _killed(*_: object) -> None:
    raise KeyboardInterrupt
