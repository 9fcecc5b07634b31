"""Rollback goes back and stays back: what is trained next starts from what is served then."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain import run
from pipeline.retrain.job import MetricsWriter, RetrainJob
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.sources import Revision
from serving.errors import Superseded
from serving.weights.release_store import (
    clear_pending,
    load_release,
    pending_release,
    set_pending,
)
from tests.retrain_fixtures import SMALL, Pipeline, facts, jsonl, serve, tiny_preset

__all__ = ["tiny_preset"]


@pytest.mark.parametrize(
    "go_back",
    [
        pytest.param(serve, id="server up"),
        pytest.param(set_pending, id="no server", marks=pytest.mark.slow),
    ],
)
def test_the_next_commit_trains_from_what_was_gone_back_to(
    tmp_path: Path, go_back: Callable[[Path, str], None]
) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL)
    releases = []
    for places in (6, 7):
        outcome = pipeline.learn({"a.jsonl": jsonl(facts(num_places=places))})
        releases.append(str(outcome.release))
        serve(pipeline.dir, releases[-1])
    first, second = (load_release(pipeline.dir / release).lineage for release in releases)
    assert second.parent == releases[0]

    go_back(pipeline.dir, releases[0])
    third = pipeline.learn({"a.jsonl": jsonl(facts(num_places=8))})
    assert third.result == "published", third.reason
    lineage = load_release(pipeline.dir / str(third.release)).lineage
    assert (lineage.mode, lineage.parent) == ("delta", releases[0])
    # The rows of the commit that was gone back from are new again: nothing pushed is lost.
    assert lineage.dataset_base_revision == first.dataset_revision
    evaluation = json.loads((tmp_path / "jobs/job-2/evaluation.json").read_text())
    assert evaluation["against"] == releases[0]
    assert pending_release(pipeline.dir) == third.release


def test_going_back_and_pushing_the_old_rows_again_changes_nothing(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL)
    old, new = ({"a.jsonl": jsonl(facts(num_places=places))} for places in (6, 7))
    first = str(pipeline.learn(old).release)
    serve(pipeline.dir, first)
    serve(pipeline.dir, str(pipeline.learn(new).release))
    serve(pipeline.dir, first)
    assert pipeline.learn(old).result == "unchanged"
    assert pipeline.learn(new).parent_release == first


def on_its_second_release(home: Path) -> tuple[Pipeline, str, Revision]:
    """A pipeline, its first release, which is no longer served, and a third commit."""
    pipeline = Pipeline(home, train=SMALL)
    first, second = (
        str(pipeline.learn({"a.jsonl": jsonl(facts(num_places=places))}).release)
        for places in (6, 7)
    )
    serve(pipeline.dir, second)
    return pipeline, first, pipeline.commit({"a.jsonl": jsonl(facts(num_places=8))})


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    pipeline, first, revision = on_its_second_release(tmp_path)
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
    evaluation = json.loads((tmp_path / "jobs/job-2/evaluation.json").read_text())
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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline, first, revision = on_its_second_release(tmp_path)
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
