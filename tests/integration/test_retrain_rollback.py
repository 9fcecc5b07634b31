"""Rollback goes back and stays back: what is trained next starts from what is served then."""

import json
from collections.abc import Callable

import pytest

from pipeline.retrain import run
from pipeline.retrain.job import MetricsWriter
from serving.weights.release_store import (
    load_release,
    pending_release,
    release_ids,
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


def test_the_next_commit_trains_from_what_was_gone_back_to(
    on_its_second_release: Pipeline,
) -> None:
    pipeline = on_its_second_release
    releases = release_ids(pipeline.dir)
    first, second = (load_release(pipeline.dir / release).lineage for release in releases)
    assert second.parent == releases[0]

    serve(pipeline.dir, releases[0])
    third = pipeline.learn(of_places(8))
    assert third.result == "published", third.reason
    lineage = load_release(pipeline.dir / str(third.release)).lineage
    assert (lineage.mode, lineage.parent) == ("delta", releases[0])
    # The rows of the commit that was gone back from are new again: nothing pushed is lost.
    assert lineage.dataset_base_revision == first.dataset_revision
    evaluation = json.loads((pipeline.home / "jobs/job-2/evaluation.json").read_text())
    assert evaluation["against"] == releases[0]
    assert pending_release(pipeline.dir) == third.release


def test_going_back_and_pushing_the_old_rows_again_changes_nothing(
    on_its_second_release: Pipeline,
) -> None:
    pipeline = on_its_second_release
    first, _ = release_ids(pipeline.dir)
    serve(pipeline.dir, first)
    assert pipeline.learn(of_places(6)).result == "unchanged"
    assert pipeline.learn(of_places(7)).parent_release == first


@pytest.mark.parametrize("stage", ["train", pytest.param("promote", marks=pytest.mark.slow)])
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
