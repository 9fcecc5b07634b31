"""A job passes over a damaged parent, and may then take the place of it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.retrain import run
from pipeline.retrain.job import DatasetSnapshot, MetricsWriter
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
from tests.swap_fixtures import lose_a_shard

__all__ = ["on_its_second_release", "tiny_preset", "two_releases"]

ROWS = [of_places(count) for count in (6, 7, 8)]


@pytest.fixture
def pipeline(on_its_second_release: Pipeline, monkeypatch: pytest.MonkeyPatch) -> Pipeline:
    pipeline = on_its_second_release

    def take_snapshot(_: object, __: str, sha: str, parent: object) -> DatasetSnapshot:
        """There is no hub to ask."""
        revision = next(pipeline.commit(rows) for rows in ROWS if pipeline.commit(rows).sha == sha)
        return pipeline.snapshot(revision).model_copy(update={"passed_over": ()})

    monkeypatch.setattr(run, "take_snapshot", take_snapshot)
    return pipeline


def retrain(pipeline: Pipeline, number: int, **settings: object) -> run.JobOutcome:
    folder = pipeline.job(pipeline.commit(ROWS[number]), **settings)
    (folder / "snapshot.json").unlink()
    return pipeline.run(folder)


def truncate_a_shard(folder: Path) -> None:
    shard = next(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 4)


def test_the_next_commit_trains_from_the_release_before_a_damaged_one(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = release_ids(pipeline.dir)
    truncate_a_shard(pipeline.dir / second)
    third = retrain(pipeline, 2)
    assert third.result == "published", third.reason
    lineage = load_release(pipeline.dir / str(third.release)).lineage
    assert (lineage.mode, lineage.parent) == ("delta", first)
    # The rows of the damaged release are new again: nothing pushed is lost.
    assert (
        lineage.dataset_base_revision == load_release(pipeline.dir / first).lineage.dataset_revision
    )
    assert pending_release(pipeline.dir) == third.release
    said = f"passing over release {second}, which is damaged: "
    assert any(each.getMessage().startswith(said) for each in caplog.records)


def test_without_a_whole_release_a_job_trains_fully_and_never_says_unchanged(
    pipeline: Pipeline,
) -> None:
    assert retrain(pipeline, 1).result == "unchanged"
    for release in release_ids(pipeline.dir):
        lose_a_shard(pipeline.dir / release)
    again = retrain(pipeline, 1)
    assert again.result == "published", again.reason
    lineage = load_release(pipeline.dir / str(again.release)).lineage
    assert (lineage.mode, lineage.parent) == ("full", None)


@pytest.mark.parametrize("restarts", [True, False], ids=["server restarts", "from memory"])
def test_a_running_job_knows_what_it_passed_over(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, restarts: bool
) -> None:
    first, second = release_ids(pipeline.dir)
    begun: list[str] = []

    def write(metrics: MetricsWriter, at: str, event: str, **values: object) -> None:
        if event == "start":
            begun.append(at)
            if restarts and at == "evaluate" and begun.count(at) == 1:
                serve(pipeline.dir, first, stands_in_for=second)
        written(metrics, at, event, **values)

    written: Callable[..., None] = MetricsWriter.write
    monkeypatch.setattr(MetricsWriter, "write", write)
    lose_a_shard(pipeline.dir / second)
    third = retrain(pipeline, 2)
    assert third.result == "published", third.reason
    assert begun.count("snapshot") == 1
    assert load_release(pipeline.dir / str(third.release)).lineage.parent == first
