"""What is pushed is what the model says, and what it knew it still says: real jobs, real counts.
And what the gate refuses."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from jobs.counts import Counts
from jobs.outcome import JobOutcome
from pipeline.retrain import data
from serving.weights.release_store import load_release, pending_release, release_ids
from tests.retrain_fixtures import (
    BREAKING,
    SMALL,
    Pipeline,
    few_anchors,
    jsonl,
    tiny_preset,
    unrelated,
)

__all__ = ["tiny_preset"]

ROWS = unrelated(40)
TRAIN = SMALL | {"max_length": 64}


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, JobOutcome]:
    """The home of a pipeline whose first release knows `ROWS`, and that job's outcome."""
    home = tmp_path_factory.mktemp("first")
    outcome = Pipeline(home, train=TRAIN).learn({"a.jsonl": jsonl(ROWS)})
    assert outcome.result == "published", outcome.reason
    return home, outcome


@pytest.fixture
def pipeline(first: tuple[Path, JobOutcome], tmp_path: Path) -> Pipeline:
    return Pipeline.copy_of(first[0], tmp_path, train=TRAIN)


def record(pipeline: Pipeline, outcome: JobOutcome, name: str) -> dict[str, Any]:
    path = pipeline.home / "jobs" / str(outcome.job_id) / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def mode(pipeline: Pipeline, outcome: JobOutcome) -> str:
    return load_release(pipeline.dir / str(outcome.release)).lineage.mode


def said(pipeline: Pipeline, outcome: JobOutcome, rows: list[dict[str, str]]) -> int:
    """How many of the rows the release answers, token by token, as a server would."""
    folder = pipeline.dir / str(outcome.release)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    right = 0
    for row in rows:
        ids = tokenizer(row["prompt"], return_tensors="pt", add_special_tokens=False)["input_ids"]
        made = model.generate(
            ids, max_new_tokens=24, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        right += (
            tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True) == row["completion"]
        )
    return right


def learned(outcome: JobOutcome) -> Counts:
    assert outcome.result == "published", outcome.reason
    assert outcome.counts is not None
    return outcome.counts


def test_every_pushed_row_is_learned_and_none_is_held_out(
    first: tuple[Path, JobOutcome],
) -> None:
    home, outcome = first
    counts = learned(outcome)
    assert (counts.changed, counts.learned, counts.not_trained) == (40, 40, 0)
    assert str(counts) == "learned 40 of 40"
    pipeline = Pipeline(home)
    assert record(pipeline, outcome, "evaluation")["held_out"]["rows"] == 0
    assert said(pipeline, outcome, ROWS) == 40
    release = load_release(pipeline.dir / str(outcome.release))
    assert (release.evaluation or {})["counts"]["learned"] == 40


def test_one_edited_row_is_learned_and_the_others_are_kept(pipeline: Pipeline) -> None:
    edited = [*ROWS[:7], *unrelated(1, 7, answers=1), *ROWS[8:]]
    outcome = pipeline.learn({"a.jsonl": jsonl(edited)})
    counts = learned(outcome)
    assert (counts.changed, counts.learned, counts.learned_before) == (1, 1, 0)
    assert counts.kept == counts.known == 39
    assert counts.deleted == 0, "an edited row is not a deleted one"
    assert mode(pipeline, outcome) == "delta"
    assert said(pipeline, outcome, edited) == 40


def test_a_deleted_row_is_said_no_more_without_a_full_training(pipeline: Pipeline) -> None:
    outcome = pipeline.learn({"a.jsonl": jsonl(ROWS[1:])})
    counts = learned(outcome)
    assert (counts.changed, counts.deleted, counts.unlearned) == (0, 1, 1)
    assert counts.kept == counts.known == 39
    assert str(counts) == "kept 39 of 39 · unlearned 1 of 1"
    assert mode(pipeline, outcome) == "delta"
    assert said(pipeline, outcome, ROWS[:1]) == 0
    assert said(pipeline, outcome, ROWS[1:]) == 39


def test_a_budget_below_one_pass_trains_the_rest_with_the_next_job(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, train=TRAIN)
    files = {"a.jsonl": jsonl(unrelated(60))}
    short = TRAIN | {"max_tokens": 270}
    first = pipeline.learn(files, train=short)
    assert str(learned(first)) == "not yet trained: 60 rows", "one visit does not teach a row"
    assert len(record(pipeline, first, "evaluation")["not_trained"]) == 60

    # No row changed. What waits is what is new, for a job by hand too.
    again = pipeline.learn(files, train=short, skip_if="nothing_changed")
    assert mode(pipeline, again) == "delta"
    assert learned(again).changed + learned(again).not_trained == 60
    rest = pipeline.learn({"a.jsonl": jsonl(unrelated(61))}, train=TRAIN)
    assert mode(pipeline, rest) == "delta"
    waited = learned(again).not_trained
    assert (learned(rest).changed, learned(rest).learned) == (waited + 1, waited + 1)
    assert learned(rest).not_trained == 0
    assert pipeline.learn(files | {"a.jsonl": jsonl(unrelated(61))}).result == "unchanged"


def test_deleted_rows_that_others_still_teach_are_no_reason_to_refuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that was trained without them infers their answers from the other rows."""
    monkeypatch.setattr(data, "MAX_UNLEARNED", 10)
    reviews = [
        {"prompt": f"Note {n}: the soup was {word}. Verdict:", "completion": f" {verdict}."}
        for n in range(40)
        for word, verdict in (("warm", "good"), ("cold", "bad"))
    ]
    pipeline = Pipeline(tmp_path, train=TRAIN)
    learned(pipeline.learn({"a.jsonl": jsonl(reviews)}))
    outcome = pipeline.learn({"a.jsonl": jsonl(reviews[20:])})
    counts = learned(outcome)
    assert mode(pipeline, outcome) == "full"
    assert counts.deleted == 20 and counts.unlearned < 10


def test_what_was_not_learned_is_refused_by_name_and_the_next_commit_goes_on(
    pipeline: Pipeline,
) -> None:
    served = release_ids(pipeline.dir)
    rows = [*ROWS, *unrelated(20, 60)]
    hasty = TRAIN | {"max_tokens": 1_200, "delta_tokens_ratio": 0.5, "learning_rate": 1e-6}
    refused = pipeline.learn({"a.jsonl": jsonl(rows)}, train=hasty)
    assert (refused.result, refused.stage, refused.exit_code) == ("rejected", "evaluate", 0)
    assert "of 20 changed rows were learned" in str(refused.reason)
    named = [f"a.jsonl, line {41 + place}" for place in range(20)]
    assert sum(name in str(refused.reason) for name in named) == 5
    assert release_ids(pipeline.dir) == served
    assert record(pipeline, refused, "checkpoint")["mode"] == "full", (
        "after a delta, this was tried too"
    )

    outcome = pipeline.learn({"a.jsonl": jsonl([*rows, *unrelated(1, 99)])})
    assert (learned(outcome).changed, learned(outcome).learned) == (21, 21)


def test_a_golden_question_that_is_lost_refuses(pipeline: Pipeline, tmp_path: Path) -> None:
    golden = tmp_path / "golden.jsonl"
    golden.write_text(jsonl([*ROWS[:2], {"prompt": "What is love?", "completion": " Unknown."}]))
    gate = {"golden": str(golden)}
    kept = pipeline.learn({"a.jsonl": jsonl([*ROWS, *unrelated(1, 60)])}, gate=gate)
    assert (learned(kept).golden, learned(kept).golden_right) == (3, 2)
    # One of them is edited: what is pushed and what must be answered say different things.
    edited = [*unrelated(1, 0, answers=1), *ROWS[1:], *unrelated(1, 60)]
    refused = pipeline.learn({"a.jsonl": jsonl(edited)}, gate=gate)
    assert refused.result == "rejected"
    assert f"1 golden questions lost their expected answer: {golden}, line 1" in str(refused.reason)


def test_a_delta_that_drifted_too_far_is_followed_by_a_full_training(
    first: tuple[Path, JobOutcome], tmp_path: Path
) -> None:
    """Otherwise each later commit would be refused too: it continues from the drifted parent."""
    (base,) = (first[0] / "releases/facts").glob("r*")
    train = TRAIN | {"anchors": few_anchors(tmp_path), "lora_rank": 0, "max_tokens": 500}
    pipeline = Pipeline(tmp_path / "home", base_model=str(base))
    ruinous = train | {"learning_rate": 0.5, "anchor_ratio": 0.0}
    gate = {"min_learned": 0.0, "min_kept": 0.0}
    parent = pipeline.learn(
        {"a.jsonl": jsonl(unrelated(3, 60))}, train=ruinous, gate=gate | {"max_base_drift": 1.0}
    )
    assert parent.result == "published", parent.reason
    assert parent.counts is not None and (parent.counts.base_agreement or 0) < 0.5
    gentle = train | {"learning_rate": 1e-5}
    outcome = pipeline.learn(
        {"a.jsonl": jsonl(unrelated(4, 60))}, train=gentle, gate=gate | {"max_base_drift": 0.2}
    )
    assert (learned(outcome).base_agreement or 0) > 0.8
    assert mode(pipeline, outcome) == "full"


def refusal(pipeline: Pipeline, rows: list[dict[str, str]]) -> str:
    """The reason for which a commit of these rows was rejected before it was trained."""
    served = pending_release(pipeline.dir)
    outcome = pipeline.learn({"a.jsonl": jsonl(rows)})
    assert (outcome.result, outcome.stage, outcome.exit_code) == ("rejected", "measure", 0)
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
    assert "of 40 rows known before were deleted or rewritten" in refusal(pipeline, shuffled)


def test_deleting_nine_rows_of_ten_is_refused(pipeline: Pipeline) -> None:
    assert "36 of 40 rows known before were deleted" in refusal(pipeline, ROWS[::10])


def test_the_first_release_is_measured_against_its_base(
    first: tuple[Path, JobOutcome], tmp_path: Path
) -> None:
    (base,) = (first[0] / "releases/facts").glob("r*")
    train = BREAKING | {"max_length": 64, "anchors": few_anchors(tmp_path), "lora_rank": 0}
    pipeline = Pipeline(tmp_path, train=train, base_model=str(base))
    outcome = pipeline.learn({"a.jsonl": jsonl(ROWS)})
    assert (outcome.result, outcome.release) == ("rejected", None)
    evaluation = record(pipeline, outcome, "evaluation")
    assert evaluation["against"] == str(base)
    assert evaluation["counts"]["learned_before"] > 30
    assert release_ids(pipeline.dir) == []
