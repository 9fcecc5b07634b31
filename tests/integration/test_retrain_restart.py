"""A job that is killed goes on where it was."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain.checkpoint import Checkpoint
from pipeline.retrain.job import MetricsWriter, read_metrics, read_record
from serving.weights.release_store import load_release, release_ids
from tests.retrain_fixtures import (
    SMALL,
    Pipeline,
    facts,
    few_anchors,
    jsonl,
    of_places,
    tiny_base,
    tiny_preset,
    unrelated,
)

__all__ = ["tiny_preset"]


def test_a_killed_training_goes_on_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    train = SMALL | {
        "max_tokens": 3_000,
        "checkpoint_seconds": 0.01,
        "anchors": few_anchors(tmp_path),
        "lora_rank": 0,
    }
    gate = {"min_learned": 0.0, "max_base_drift": 1.0}
    base = tiny_base(tmp_path)
    whole, killed = (
        Pipeline(tmp_path / name, base_model=base, train=train, gate=gate)
        for name in ("whole", "killed")
    )
    rows = {"a.jsonl": jsonl(facts())}

    expected = whole.learn(rows)

    folder = killed.job(killed.commit(rows))
    process = killed.start(folder)
    while (saved := read_record(folder / "checkpoint.json", Checkpoint)) is None or saved.step < 4:
        assert process.poll() is None, (folder / "log.txt").read_text()
        time.sleep(0.005)
    process.kill()
    process.wait()
    saved = read_record(folder / "checkpoint.json", Checkpoint)
    assert saved is not None
    assert not saved.finished
    assert not (folder / "outcome.json").exists()

    outcome = killed.run(folder)
    assert outcome.result == expected.result == "published"
    assert outcome.counts == expected.counts
    done = read_record(folder / "checkpoint.json", Checkpoint)
    assert done is not None and done.finished
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    steps = [metric.step for metric in metrics if metric.event == "step"]
    restarted = steps.index(saved.step + 1, len(steps) - 1 - steps[::-1].index(saved.step + 1))
    assert steps[restarted:] == list(range(saved.step + 1, done.step + 1))
    weights = [
        {name: tensor.digest for name, tensor in load_release(home.dir / str(id)).tensors.items()}
        for home, id in ((whole, expected.release), (killed, outcome.release))
    ]
    assert weights[0] == weights[1]


def test_a_training_goes_on_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, written = {"checkpoint_url": f"file://{tmp_path}/store"}, MetricsWriter.write
    train = SMALL | {"max_tokens": 1_000, "checkpoint_seconds": 1e-9} | store
    pipeline = Pipeline(tmp_path / "home", train=train, gate={"min_learned": 0.0})
    lost = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts())}))

    def write(metrics: MetricsWriter, stage: Any, event: Any, **values: Any) -> None:
        if event == "step" and values["step"] == 4:
            raise KeyboardInterrupt
        written(metrics, stage, event, **values)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MetricsWriter, "write", write)
        pipeline.run(lost)
    there = tmp_path / "there" / lost.name
    there.mkdir(parents=True)
    for name in ("snapshot.json", "spec.json"):
        shutil.copy(lost / name, there)
    assert pipeline.run(there).result == "published"
    metrics, _ = read_metrics(there / "metrics.jsonl")
    steps = [each.step for each in metrics if each.event == "step"]
    assert steps[0] == 4 and len(steps) > 1


CHANGED = {"a.jsonl": jsonl([*facts(num_places=4), *unrelated(6)])}


def with_a_release(home: Path) -> Pipeline:
    """A pipeline whose deltas learn nothing, so that a full training follows."""
    train = SMALL | {"delta_learning_rate_ratio": 1e-6, "max_tokens": 3_000}
    pipeline = Pipeline(home, train=train | {"checkpoint_seconds": 1e-9})
    assert pipeline.learn(of_places(4)).result == "published"
    return pipeline


def test_a_job_that_was_killed_in_its_second_training_comes_to_the_same_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = with_a_release(tmp_path / "whole").learn(CHANGED)
    told = tmp_path / "whole/jobs/job-1"
    wanted = read_record(told / "checkpoint.json", Checkpoint)
    assert wanted is not None and wanted.mode == "full"
    metrics, _ = read_metrics(told / "metrics.jsonl")
    steps = [each.step or 0 for each in metrics if each.event == "step"]
    begun, written = steps.index(1, 1), MetricsWriter.write
    done: list[int] = []

    def write(metrics: MetricsWriter, stage: Any, event: Any, **values: Any) -> None:
        done.extend([1] * (event == "step"))
        if len(done) == (begun + len(steps)) // 2:
            raise KeyboardInterrupt
        written(metrics, stage, event, **values)

    killed = with_a_release(tmp_path / "killed")
    folder = killed.job(killed.commit(CHANGED))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(MetricsWriter, "write", write)
        killed.run(folder)
    outcome = killed.run(folder)
    assert (outcome.result, outcome.counts) == (expected.result, expected.counts)
    assert read_record(folder / "checkpoint.json", Checkpoint) == wanted
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    assert [each.step for each in metrics if each.event == "step"] == steps


def test_a_job_that_had_published_only_promotes(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL | {"max_tokens": 500}, gate={"min_learned": 0.0})
    folder = pipeline.job(pipeline.commit({"a.jsonl": jsonl(facts())}))
    first = pipeline.run(folder)
    (folder / "outcome.json").unlink()
    (folder / "metrics.jsonl").unlink()
    again = pipeline.run(folder)
    assert again.release == first.release
    assert again.dataset_revision == first.dataset_revision
    assert release_ids(pipeline.dir) == [first.release]
    metrics, _ = read_metrics(folder / "metrics.jsonl")
    assert {metric.stage for metric in metrics} == {"promote"}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (None, "No such file or directory"),
        (
            '{"command": ["x"], "settings": {"pipeline": "a", "dataset": "a/b", '
            '"releases_dir": "r", "bases_dir": "b", "kepe": 3}}',
            "1 validation error for RetrainSettings",
        ),
    ],
)
def test_a_bad_spec_still_leaves_an_outcome(
    tmp_path: Path, spec: str | None, expected: str
) -> None:
    from pipeline.retrain.run import main

    if spec is not None:
        (tmp_path / "spec.json").write_text(spec)
    assert main({"JOB_DIR": str(tmp_path), "JOB_ID": "j1"}) == 1
    outcome = JobOutcome.model_validate_json((tmp_path / "outcome.json").read_bytes())
    assert (outcome.result, outcome.job_id) == ("failed", "j1")
    assert expected in str(outcome.reason)


def test_an_unexpected_error_names_itself_and_leaves_the_traceback_to_the_log(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(tmp_path, releases_dir=str(tmp_path / "a-file/releases"), train=SMALL)
    (tmp_path / "a-file").write_text("not a folder")
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "spec.json").write_text(pipeline.spec("0" * 40).model_dump_json())
    outcome = pipeline.run(folder)
    assert (outcome.result, outcome.stage) == ("failed", "snapshot")
    assert "NotADirectoryError" in str(outcome.reason)
    assert len(json.dumps(outcome.reason).splitlines()) == 1


def test_only_a_failure_that_can_pass_asks_for_another_attempt(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, train=SMALL)
    folder = tmp_path / "job"
    folder.mkdir()
    # The job asks where the branch is. For the files of a commit, the client library itself would
    # ask again for 23 s.
    spec = pipeline.spec("0" * 40).model_copy(update={"revisions": None})
    (folder / "spec.json").write_text(spec.model_dump_json())
    away = pipeline.run(folder)  # nothing listens where the hub should be
    assert (away.result, away.stage, away.may_pass) == ("failed", "snapshot", True)
    (folder / "spec.json").write_text("{")
    assert not pipeline.run(folder).may_pass
