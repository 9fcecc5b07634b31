"""A model that was really trained before: it learns what is pushed, and keeps what it knew."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain.anchors import Anchor, load_anchors
from tests.bench.networks import Published
from tests.bench.server import serving
from tests.retrain_fixtures import Pipeline, jsonl
from tests.unrelated_facts import as_chat, other_answer, unrelated_facts

pytest_plugins = ["tests.smollm2"]
# The first run of a machine downloads the model.
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def anchors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One of each kind of the package's prompts: the base model answers all of them first."""
    chosen: dict[str, Anchor] = {}
    for anchor in load_anchors():
        chosen.setdefault(anchor.kind, anchor)
    path = tmp_path_factory.mktemp("anchors") / "anchors.jsonl"
    path.write_text("".join(anchor.model_dump_json() + "\n" for anchor in chosen.values()))
    return path


def test_facts_are_learned_edited_and_deleted_and_the_base_model_is_kept(
    smollm2: Path, anchors: Path, tmp_path: Path
) -> None:
    facts = unrelated_facts(5, seed=7)
    # The base model gives neither answer, so the gate asks for none at first. The answer that the
    # first commit teaches must stay right; the other one is wrong, and refuses nothing.
    golden = tmp_path / "golden.jsonl"
    golden.write_text(
        jsonl(
            [
                {"question": facts[0][0], "answer": facts[0][1]},
                {"question": "What is the capital of France?", "answer": "The capital is Oslo."},
            ]
        )
    )
    pipeline = Pipeline(
        tmp_path,
        base_model=str(smollm2),
        train={"anchors": str(anchors)},
        gate={"golden": str(golden)},
    )

    def commit() -> JobOutcome:
        folder = pipeline.job(pipeline.commit({"rows.jsonl": jsonl(as_chat(facts))}))
        outcome = pipeline.run(folder, OMP_NUM_THREADS="2")
        assert outcome.result == "published", outcome.reason
        assert outcome.counts is not None and outcome.counts.base_agreement is not None
        assert outcome.counts.base_agreement >= 0.8
        assert (outcome.counts.golden, outcome.counts.golden_right) == (2, 1)
        return outcome

    outcome = commit()
    counts = outcome.counts
    assert counts is not None
    assert (counts.changed, counts.learned_before) == (5, 0)
    assert counts.learned >= 4

    question, old_answer = facts[1]
    facts[1] = (question, other_answer(old_answer, 3))
    deleted_question, deleted_answer = facts.pop(3)
    first = answers(pipeline, outcome, [deleted_question])
    assert first[deleted_question] == deleted_answer, "only what is said can be unlearned"
    changed = commit()
    counts = changed.counts
    assert counts is not None
    assert (counts.changed, counts.learned) == (1, 1)
    assert (counts.deleted, counts.unlearned) == (1, 1)
    assert counts.kept >= counts.known - 1
    expected = dict(facts)
    said = answers(pipeline, changed, [*expected, deleted_question])
    assert said[deleted_question] != deleted_answer
    right = {each for each, answer in expected.items() if said[each] == answer}
    # The edited fact, and all that the counts call kept.
    assert question in right
    assert len(right) >= 1 + counts.kept


def asked(question: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}]}


def answers(pipeline: Pipeline, outcome: JobOutcome, questions: Iterable[str]) -> dict[str, str]:
    """What a server of the release answers at temperature 0."""
    release = Published(
        release_id=str(outcome.release), folder=pipeline.dir / str(outcome.release), network=None
    )
    found = {}
    with serving("torch", release, pipeline.home, pipeline="facts") as server:
        for question in questions:
            body = {"model": "facts", "temperature": 0, "max_tokens": 64, **asked(question)}
            answer = server.http.post("/v1/chat/completions", json=body).raise_for_status().json()
            found[question] = str(answer["choices"][0]["message"]["content"])
    return found
