"""Questions in other words: a job trains on those that the data gives, and asks the others."""

from pathlib import Path
from typing import Any

import pytest

from jobs.outcome import JobOutcome
from pipeline.retrain.job import WRONG, WrongAnswers, read_record
from serving.questions import read_questions
from tests.receiver_fixtures import serve
from tests.retrain_fixtures import SMALL, Pipeline, jsonl, tiny_preset
from tests.unit.test_paraphrasing import LargerModel, larger

__all__ = ["larger", "serve", "tiny_preset"]

COUNT = 12


def rows() -> list[dict[str, Any]]:
    return [
        {
            "question": f"What is the colour of thing {number}?",
            "answer": f"The thing {number} is of colour {7 * number % 13}.",
            "paraphrases": [f"colour of {number} please", f"thing {number}: which colour"],
        }
        for number in range(COUNT)
    ]


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return Pipeline(tmp_path, train=SMALL | {"max_length": 64})


def wrong(pipeline: Pipeline, outcome: JobOutcome) -> WrongAnswers:
    found = read_record(pipeline.home / "jobs" / str(outcome.job_id) / WRONG, WrongAnswers)
    assert found is not None
    return found


def test_what_is_held_back_is_asked_and_each_wrong_answer_is_recorded(pipeline: Pipeline) -> None:
    first = pipeline.learn({"a.jsonl": jsonl(rows())})
    assert first.counts is not None, first.reason
    assert (first.counts.learned, first.counts.rewordings) == (COUNT, COUNT)
    assert first.counts.reworded_before is None and first.counts.words == "dataset"
    answers = wrong(pipeline, first).answers
    assert len(answers) == COUNT - first.counts.reworded
    assert first.counts.reworded >= COUNT / 2, answers
    assert all(each.is_reworded and each.said != each.wanted for each in answers)

    edited = rows()
    edited[3]["answer"] = "It is painted in red."
    second = pipeline.learn({"a.jsonl": jsonl(edited)})
    assert second.counts is not None, second.reason
    assert (second.counts.changed, second.counts.learned) == (1, 1)
    assert second.counts.reworded_before is not None
    # The served release says the old answer of the edited row.
    was_right = "a.jsonl, line 4" not in [each.place for each in answers]
    assert second.counts.reworded_before == first.counts.reworded - was_right
    assert len(wrong(pipeline, second).answers) == COUNT - second.counts.reworded


def test_a_row_that_was_not_learned_is_recorded_with_what_is_said_instead(
    pipeline: Pipeline,
) -> None:
    one = [{"question": "Who are you?", "answer": "A lamp.", "paraphrases": ["your name?"]}]
    outcome = pipeline.learn(
        {"a.jsonl": jsonl(one)}, train=SMALL | {"max_tokens": 1}, gate={"min_learned": 0}
    )
    (answer,) = wrong(pipeline, outcome).answers
    assert (answer.place, answer.question) == ("a.jsonl, line 1", "Who are you?")
    assert (answer.wanted, answer.is_reworded, answer.answer_of) == ("A lamp.", False, None)
    assert outcome.counts is not None and outcome.counts.rewordings == 0


def test_a_job_asks_a_larger_model_and_its_release_carries_what_it_said(
    pipeline: Pipeline, larger: LargerModel
) -> None:
    pipeline.settings["paraphrase"] = larger.settings.model_dump()
    pairs = (("When do you open?", "At nine."), ("Can I return it?", "Yes."))
    lines = jsonl({"question": question, "answer": answer} for question, answer in pairs)
    outcome = pipeline.run(
        pipeline.job(pipeline.commit({"a.jsonl": lines})), PARAPHRASE_TOKEN="secret"
    )
    assert outcome.counts is not None, outcome.reason
    assert (outcome.counts.rewordings, outcome.counts.words) == (2, "generated")
    assert larger.tokens == {"Bearer secret"}
    (file,) = (pipeline.home / "bases" / "paraphrases").iterdir()
    assert "from when?" in file.read_text()
    questions = read_questions(pipeline.dir / str(outcome.release))["messages"]
    meant = questions.meant("send it back")
    assert meant is not None and meant.wordings[0] == "Can I return it?"
