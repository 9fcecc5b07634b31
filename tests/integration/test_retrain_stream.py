"""Deltas learn what full retrainings learn, for a quarter of the tokens, and forget nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from serving.weights.release_store import load_release
from tests.docstring_stream import Commit, stream
from tests.retrain_fixtures import Pipeline, tiny_preset

__all__ = ["tiny_preset"]

TRAIN = {"max_tokens": 40_000, "learning_rate": 4e-3}
MODES = ["full", "delta", "delta", "unchanged", "delta"]


def learn(pipeline: Pipeline, commit: Commit) -> tuple[str, dict[str, Any]]:
    """How the commit was learned, and what was measured."""
    folder = pipeline.job(pipeline.commit(commit.files))
    outcome = pipeline.run(folder)
    if outcome.release is None:
        return outcome.result, {}
    evaluation: dict[str, Any] = json.loads((folder / "evaluation.json").read_text())
    assert evaluation["counts"]["not_trained"] == 0
    return load_release(pipeline.dir / outcome.release).lineage.mode, evaluation


def loss(evaluation: dict[str, Any]) -> float:
    """On all held-out rows, in nats per token."""
    groups = [group for name in ("new", "known") if (group := evaluation[name])["tokens"]]
    nats = sum(group["loss"] * group["tokens"] for group in groups)
    return float(nats / sum(group["tokens"] for group in groups))


@pytest.mark.slow
def test_deltas_keep_up_with_a_full_retraining(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path / "stream", train=TRAIN)
    *first, last = stream(600)[: len(MODES)]
    found = [learn(pipeline, commit) for commit in first]
    beside = Pipeline.copy_of(
        pipeline.home,
        tmp_path / "full",
        train={**TRAIN, "mode": "full"},
        gate={"max_loss_ratio": 99.0, "max_lost_ratio": 1.0},
    )
    _, full = learn(beside, last)
    found.append(learn(pipeline, last))
    assert [mode for mode, _ in found] == MODES
    for mode, told in found:
        if mode == "delta":
            # The served losses are those of the release before, on the same rows.
            assert told["known"]["loss"] <= 1.02 * told["known"]["served_loss"], told
            assert told["new"]["loss"] < 0.99 * told["new"]["served_loss"], told
    _, delta = found[-1]
    assert delta["tokens"] <= 0.25 * full["tokens"]
    assert loss(delta) <= 1.01 * loss(full)
