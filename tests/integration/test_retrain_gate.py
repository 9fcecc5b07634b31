"""What the gate refuses and what it lets through, with real trainings on one first release."""

import json
import random
from pathlib import Path

import pytest

from serving.weights.release_store import pending_release, release_ids
from tests.retrain_fixtures import BREAKING, Pipeline, facts, few_anchors, jsonl, tiny_preset

__all__ = ["tiny_preset"]

TRAIN = {"learning_rate": 4e-3, "delta_tokens_ratio": 1.0, "max_length": 64}
ROWS = facts(num_places=20)


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home of a pipeline whose first release knows `ROWS`."""
    home = tmp_path_factory.mktemp("first")
    outcome = Pipeline(home, train=TRAIN).learn({"a.jsonl": jsonl(ROWS)})
    assert outcome.result == "published"
    return home


@pytest.fixture
def pipeline(first: Path, tmp_path: Path) -> Pipeline:
    return Pipeline.copy_of(first, tmp_path, train=TRAIN)


def refusal(
    pipeline: Pipeline, rows: list[dict[str, str]], *, stage: str = "measure", **train: object
) -> str:
    """The reason that the commit of these rows was rejected for: before training, unless said."""
    served = pending_release(pipeline.dir)
    outcome = pipeline.learn({"a.jsonl": jsonl(rows)}, train=TRAIN | train)
    assert (outcome.result, outcome.stage, outcome.exit_code) == ("rejected", stage, 0)
    assert pending_release(pipeline.dir) == served
    assert release_ids(pipeline.dir) == [served]
    return str(outcome.reason)


def test_shuffled_completions_are_refused(pipeline: Pipeline) -> None:
    completions = [row["completion"] for row in ROWS]
    random.Random(1).shuffle(completions)
    shuffled = [
        {"prompt": row["prompt"], "completion": completion}
        for row, completion in zip(ROWS, completions, strict=True)
    ]
    assert "of 60 rows known before were deleted or rewritten" in refusal(pipeline, shuffled)


def test_deleting_nine_rows_of_ten_is_refused(pipeline: Pipeline) -> None:
    assert "54 of 60 rows known before were deleted" in refusal(pipeline, ROWS[::10])


def test_the_first_release_is_measured_against_its_base(first: Path, tmp_path: Path) -> None:
    (base,) = (first / "releases/facts").glob("r*")
    train = BREAKING | {"max_length": 64, "anchors": few_anchors(tmp_path), "lora_rank": 0}
    pipeline = Pipeline(tmp_path, train=train, base_model=str(base))
    outcome = pipeline.learn({"a.jsonl": jsonl(ROWS)})
    assert (outcome.result, outcome.release) == ("rejected", None)
    evaluation = json.loads((tmp_path / "jobs/job-0/evaluation.json").read_text())
    assert evaluation["against"] == str(base)
    assert evaluation["counts"]["learned_before"] > 40
    assert release_ids(pipeline.dir) == []
