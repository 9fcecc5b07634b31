"""Weights of one's own trainer are judged, published and told as those of the retraining are."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain import run
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.run import main
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.sources import Revision
from serving.weights.release_store import (
    load_release,
    pending_release,
    release_ids,
)
from serving.weights.verify import verify_release
from tests.retrain_fixtures import SMALL, Pipeline, jsonl, serve, tiny_preset, unrelated

__all__ = ["tiny_preset"]

OLD, NEW = ({"a.jsonl": jsonl(unrelated(count))} for count in (24, 30))


@pytest.fixture(scope="module")
def homes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The home of a pipeline whose served release knows the old rows, and a folder of weights that
    know all rows."""
    found = []
    for name, rows in (("served", OLD), ("trained", NEW)):
        home = tmp_path_factory.mktemp(name)
        pipeline = Pipeline(home, train=SMALL)
        outcome = pipeline.learn(rows)
        assert outcome.counts is not None and outcome.counts.learned == outcome.counts.changed
        serve(pipeline.dir, str(outcome.release))
        found.append(home if name == "served" else pipeline.dir / str(outcome.release))
    (found[1] / "release.json").unlink()
    return found[0], found[1]


@pytest.fixture
def pipeline(homes: tuple[Path, Path], tmp_path: Path) -> Pipeline:
    shutil.copytree(homes[0], tmp_path / "home")
    shutil.copytree(homes[1], tmp_path / "checkpoint")
    return Pipeline(tmp_path / "home", train=SMALL)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


def promote(
    pipeline: Pipeline, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, **told: Any
) -> JobOutcome:
    """What `pipeline releases promote` does in a job that a push of all rows has started."""
    revision: Revision = pipeline.commit(NEW)
    job_dir = pipeline.job(revision)
    monkeypatch.setattr(run, "take_snapshot", lambda *_: pipeline.snapshot(revision))  # no hub
    environ = pipeline.environ(job_dir)
    spec = pipeline.spec(revision.sha)
    settings = RetrainSettings.model_validate(spec.settings)
    records = job_dir / "promotion"
    records.mkdir()
    job = RetrainJob.of(
        environ, records, settings, spec.revisions, trained_folder=checkpoint, **told
    )
    code = main(environ, lambda _: job)
    outcome = JobOutcome.model_validate_json((job_dir / "outcome.json").read_bytes())
    assert code == outcome.exit_code
    return outcome


def test_weights_that_know_the_rows_are_published_with_their_counts(
    pipeline: Pipeline, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served,) = release_ids(pipeline.dir)
    outcome = promote(pipeline, checkpoint, monkeypatch)
    assert (outcome.result, outcome.job_id) == ("published", "job-1"), outcome.reason
    assert str(outcome.counts) == "learned 6 of 6 · kept 24 of 24"
    assert pending_release(pipeline.dir) == outcome.release
    release = load_release(pipeline.dir / str(outcome.release))
    assert (release.lineage.job_id, release.lineage.parent) == ("job-1", served)
    assert release.lineage.dataset_revision == outcome.dataset_revision
    assert (release.lineage.mode, release.lineage.delivery_ids) == (None, ("d1",))
    assert release.probe is not None and release.evaluation is not None
    assert verify_release(pipeline.dir / release.id) == ()
    # The next job of the retraining does not go on from weights that it has not trained.
    again = pipeline.learn(NEW)
    assert load_release(pipeline.dir / str(again.release)).lineage.mode == "full"


def test_weights_that_know_less_are_rejected(
    pipeline: Pipeline, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = release_ids(pipeline.dir)
    shutil.rmtree(checkpoint)
    shutil.copytree(pipeline.dir / before[0], checkpoint)
    (checkpoint / "release.json").unlink()
    outcome = promote(pipeline, checkpoint, monkeypatch)
    assert (outcome.result, outcome.exit_code) == ("rejected", 0)
    assert str(outcome.counts).startswith("learned 0 of 6 · kept 24 of 24")
    assert "only 0 of 6 changed rows were learned" in str(outcome.reason)
    assert release_ids(pipeline.dir) == before
    assert pending_release(pipeline.dir) is None


def test_weights_that_cannot_be_judged_are_served_and_the_outcome_says_why(
    pipeline: Pipeline, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in checkpoint.glob("tokenizer*"):
        file.unlink()
    outcome = promote(pipeline, checkpoint, monkeypatch)
    assert (outcome.result, outcome.counts) == ("published", None)
    assert "not judged by the rows: " in str(outcome.reason)
    release = load_release(pipeline.dir / str(outcome.release))
    assert (release.lineage.dataset_revision, release.evaluation) == (
        outcome.dataset_revision,
        None,
    )


def test_weights_that_were_trained_from_another_release_are_superseded(
    pipeline: Pipeline, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (served,) = release_ids(pipeline.dir)
    outcome = promote(pipeline, checkpoint, monkeypatch, trained_from="r000009-0123abcd")
    assert (outcome.result, outcome.release) == ("superseded", None)
    assert f"{served} was chosen meanwhile" in str(outcome.reason)
    assert release_ids(pipeline.dir) == [served]
