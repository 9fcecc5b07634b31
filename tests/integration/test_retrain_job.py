"""Whole jobs, from a revision on disk to a published release."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.outcome import JobOutcome
from pipeline.retrain.job import Stage, read_metrics
from serving.weights.release_store import load_release, pending_release, release_ids
from serving.weights.verify import verify_release
from tests.retrain_fixtures import (
    BREAKING,
    SMALL,
    Pipeline,
    facts,
    few_anchors,
    jsonl,
    of_places,
    tiny_base,
    tiny_preset,
)

__all__ = ["tiny_preset"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobOutcome]:
    """The home of a pipeline whose only release knows the facts, and the outcome of its job."""
    pipeline = Pipeline(tmp_path_factory.mktemp("first"), train=SMALL)
    outcome = pipeline.learn({"a.jsonl": jsonl(facts()), "README.md": "hello"})
    return pipeline.home, outcome


@pytest.fixture
def pipeline(first: tuple[Path, JobOutcome], tmp_path: Path) -> Pipeline:
    return Pipeline.copy_of(first[0], tmp_path, train=SMALL)


@pytest.fixture
def empty(tmp_path: Path) -> Pipeline:
    """A pipeline without a release."""
    return Pipeline(tmp_path, train=SMALL)


def record(pipeline: Pipeline, number: int, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((pipeline.home / f"jobs/job-{number}" / name).read_text())
    return found


def test_two_commits_become_a_release_and_its_delta(
    first: tuple[Path, JobOutcome], pipeline: Pipeline
) -> None:
    _, outcome = first
    assert (outcome.result, outcome.stage, outcome.parent_release) == ("published", "promote", None)
    assert outcome.delivery_ids == ("d1",)
    assert outcome.release is not None
    assert pending_release(pipeline.dir) == outcome.release

    release = load_release(pipeline.dir / outcome.release)
    assert verify_release(pipeline.dir / outcome.release) == ()
    assert release.lineage.mode == "full"
    assert release.lineage.settings_digest is not None
    assert release.lineage.dataset_revision == outcome.dataset_revision
    evaluation = record(pipeline, 0, "evaluation.json")
    assert evaluation["against"] == "preset:tiny"
    assert evaluation["new"]["loss"] < evaluation["new"]["served_loss"]

    changed = [
        *facts(num_places=5),
        *facts(num_places=6, answers=2)[15:],
        *facts(num_places=9)[18:],
    ]
    second = pipeline.learn({"a.jsonl": jsonl(changed)})
    assert second.result == "published"
    assert second.parent_release == outcome.release
    assert second.release is not None
    lineage = load_release(pipeline.dir / second.release).lineage
    assert (lineage.mode, lineage.parent) == ("delta", outcome.release)
    assert lineage.dataset_base_revision == outcome.dataset_revision
    evaluation = record(pipeline, 1, "evaluation.json")
    assert evaluation["against"] == outcome.release
    assert evaluation["total_tokens"] > evaluation["tokens"]
    assert second.counts is not None
    assert second.counts.learned >= 0.9 * second.counts.changed > 0
    assert second.counts.model_dump() == evaluation["counts"]


def test_plain_text_is_told_by_its_loss_and_its_deletion_means_a_full_training(
    empty: Pipeline,
) -> None:
    texts = [{"text": fact["prompt"] + fact["completion"]} for fact in facts(num_places=10)]
    counts = empty.learn({"a.jsonl": jsonl(texts)}).counts
    assert counts is not None and counts.changed == 0
    assert counts.text_loss is not None and counts.text_loss_before is not None
    assert counts.text_loss < counts.text_loss_before
    assert re.fullmatch(r"text \d\.\d\d → \d\.\d\d nats", str(counts))
    # These weights are far worse: only what a removal is allowed lets them pass.
    revision = empty.commit({"a.jsonl": jsonl(texts[:-1])})
    hasty = SMALL | {"learning_rate": 1e-7}
    refused = empty.run(empty.job(revision, train=hasty))
    assert refused.result == "rejected" and "allows x1.15" in str(refused.reason)
    fewer = empty.run(empty.job(revision, train=hasty, gate={"max_loss_ratio": 99.0}))
    assert fewer.result == "published", fewer.reason
    assert load_release(empty.dir / str(fewer.release)).lineage.mode == "full"
    assert fewer.parent_release is None


def test_worse_weights_are_served_if_a_person_forces_them(pipeline: Pipeline) -> None:
    ruined = [*facts(), *facts(num_places=9)[18:]]
    forced = pipeline.learn({"a.jsonl": jsonl(ruined)}, train=BREAKING, force_reason="a test of it")
    assert forced.result == "published"
    assert "a test of it" in str(forced.reason)
    lineage = load_release(pipeline.dir / str(forced.release)).lineage
    assert "a test of it" in str(lineage.forced)
    assert re.search(r"only \d of 9 changed rows were learned", str(lineage.forced))


def test_a_loss_that_is_no_number_ends_the_job(empty: Pipeline) -> None:
    endless = SMALL | {"learning_rate": 1e30, "max_grad_norm": 1e30, "max_epochs": 20}
    outcome = empty.learn({"a.jsonl": jsonl(facts())}, train=endless)
    assert outcome.result in ("failed", "rejected")
    assert re.search("not a number|training diverged", str(outcome.reason))
    assert release_ids(empty.dir) == []


def test_bad_data_fails_the_job_and_leaves_the_release(pipeline: Pipeline) -> None:
    releases = release_ids(pipeline.dir)
    outcome = pipeline.learn({"a.jsonl": '{"text": "a"}\n{"text": \n'})
    assert (outcome.result, outcome.stage, outcome.exit_code) == ("failed", "data", 1)
    assert "a.jsonl, line 2: not JSON" in str(outcome.reason)
    assert "\n" not in str(outcome.reason)
    assert release_ids(pipeline.dir) == releases


def test_a_commit_that_changes_no_row_to_learn_trains_nothing(
    pipeline: Pipeline, caplog: pytest.LogCaptureFixture
) -> None:
    releases = release_ids(pipeline.dir)
    said = [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "ok"}]
    with caplog.at_level("INFO"):
        outcome = pipeline.learn(
            {"c.jsonl": jsonl(facts()[::-1]), "b.jsonl": jsonl([{"messages": said}])}
        )
    assert (outcome.result, outcome.stage, outcome.release) == ("unchanged", "data", None)
    assert release_ids(pipeline.dir) == releases
    assert "  nothing to learn, so left out, 1 row: b.jsonl, line 1" in caplog.messages


def test_a_local_folder_is_a_base_model_and_keeps_its_dtype(tmp_path: Path) -> None:
    preset = tiny_base(tmp_path, jsonl(facts()))
    folder = tmp_path / "my-model"
    AutoModelForCausalLM.from_pretrained(preset, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(preset).save_pretrained(folder)
    train = SMALL | {"anchors": few_anchors(tmp_path), "lora_rank": 0}
    gate = {"max_base_drift": 1.0}
    other = Pipeline(tmp_path / "other", base_model=str(folder), train=train, gate=gate)
    outcome = other.learn({"a.jsonl": jsonl(facts())})
    assert outcome.result == "published", outcome.reason
    release = load_release(other.dir / str(outcome.release))
    assert {tensor.dtype for tensor in release.tensors.values()} == {"BF16"}
    assert release.lineage.base_model == str(folder)
    assert outcome.counts is not None and outcome.counts.base_agreement is not None


def test_the_metrics_tell_every_stage_and_step(pipeline: Pipeline) -> None:
    path = pipeline.home / "jobs/job-0/metrics.jsonl"
    metrics, end = read_metrics(path)
    stages = list(get_args(Stage))
    for event in ("start", "end"):
        told = [metric.stage for metric in metrics if metric.event == event]
        assert list(dict.fromkeys(told)) == stages
        assert sorted(told, key=stages.index) == told
    measured = [metric for metric in metrics if metric.event == "measured"]
    assert [(metric.stage, metric.measured, metric.rows) for metric in measured] == [
        ("measure", 18, 18),
        ("evaluate", 18, 18),
    ]
    steps = [metric for metric in metrics if metric.event == "step"]
    assert [metric.step for metric in steps] == list(range(1, len(steps) + 1))
    assert all(metric.loss and metric.learning_rate and metric.tokens for metric in steps)
    assert end == path.stat().st_size
    assert read_metrics(path, end) == ((), end)


def test_old_releases_go(pipeline: Pipeline) -> None:
    for places in (7, 8):
        pipeline.learn(of_places(places), keep=2)
    assert [release[:7] for release in release_ids(pipeline.dir)] == ["r000002", "r000003"]
