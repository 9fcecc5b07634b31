"""Other wordings that a larger model gives, over HTTP."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from pipeline.retrain import paraphrasing
from pipeline.retrain.paraphrasing import paraphrased
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import ParaphraseSettings
from pipeline.retrain.wordings import Wordings
from tests.receiver_fixtures import serve
from tests.unit.test_retrain_plan import data
from tests.unit.test_wordings import row

__all__ = ["serve"]

OPEN, BACK = row("When do you open?", "At nine."), row("Can I return it?", "Yes.", 1)


class LargerModel:
    """Answers each question with the texts that a test has set for it. Refuses it if there are
    none."""

    def __init__(self) -> None:
        self.failures: list[int] = []
        """The status of the next answers, before the right ones."""
        self.says = {
            "When do you open?": 'Sure:\n["opening hours", " from when? ", "opening hours"]',
            "Can I return it?": '["give it back", "send it back"]',
        }
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()
        self.settings = ParaphraseSettings(url="http://127.0.0.1:9/v1", model="large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        assert request.url.path == "/v1/chat/completions"
        (message,) = (await request.json())["messages"]
        (question,) = (each for each in self.says if f"Question: {each}\n" in message["content"])
        self.asked.append(question)
        self.tokens.add(request.headers.get("authorization"))
        content = {"choices": [{"message": {"content": self.says[question]}}]}
        usual = 200 if self.says[question] else 400
        status = self.failures.pop(0) if self.failures else usual
        await JSONResponse(content, status)(scope, receive, send)


@pytest.fixture
def larger(serve: Callable[[ASGIApp], str]) -> LargerModel:
    model = LargerModel()
    model.settings = ParaphraseSettings(url=f"{serve(model)}/v1", model="large")
    return model


def test_each_row_is_asked_for_once_and_again_after_an_edit(
    larger: LargerModel, tmp_path: Path
) -> None:
    file = tmp_path / "paraphrases" / "shop.jsonl"
    own = row("Who are you?", "A shop.", 2, "your name")
    found = paraphrased(data(changed=(OPEN, BACK, own)), larger.settings, file, "secret")
    assert sorted(larger.asked) == ["Can I return it?", "When do you open?"]
    assert larger.tokens == {"Bearer secret"}
    assert [set(each.wordings) for each in found.rows] == [
        {"opening hours", "from when?"},
        {"give it back", "send it back"},
        {"your name"},
    ]
    assert [each.digest for each in found.rows] == [each.digest for each in (OPEN, BACK, own)]
    written = [json.loads(line) for line in file.read_text().splitlines()]
    assert {"question": "Can I return it?", "answer": "Yes."}.items() <= written[1].items()

    edited = row("Can I return it?", "No.", 1)
    changed = data(mode="delta", changed=(edited,), known=(OPEN,), deleted=(BACK,))
    found = paraphrased(changed, larger.settings, file, None)
    assert larger.asked[2:] == ["Can I return it?"]
    assert all(len(each.wordings) == 2 for each in (*found.changed, *found.known))
    assert found.deleted[0].wordings == (), "the edited row teaches them"


def test_what_is_generated_is_asked_before_what_is_made_up(
    larger: LargerModel, tmp_path: Path
) -> None:
    found = paraphrased(data(changed=(OPEN, BACK)), larger.settings, tmp_path / "a.jsonl", None)
    wordings = Wordings(found.rows, count=8, made_up=0, seed=0)
    asked, words = wordings.unseen(found.rows, ())
    trained, held_back = zip(*(each.wordings for each in found.rows), strict=True)
    assert {each.prompt for each in asked} == set(held_back)
    assert words == "generated"
    assert [each.prompt for each in wordings.trained(found.rows[0])] == [trained[0]]
    many = [replace(each, generated=("one?", "two?", "three?", "four?")) for each in found.rows]
    some = Wordings(many, count=2, made_up=0, seed=0)
    assert [each.prompt for each in some.trained(many[0])] == ["one?", "two?"]
    without = Wordings(found.rows, count=0, made_up=0, seed=0)
    assert without.trained(found.rows[0]) == []
    assert without.unseen(found.rows, ()) == (asked, words)


def test_words_that_belong_to_two_questions_are_left_out(
    larger: LargerModel, tmp_path: Path
) -> None:
    larger.says["When do you open?"] = '["Hello?", "can I return it?", "opening hours"]'
    larger.says["Can I return it?"] = '["hello?", "send it back"]'
    found = paraphrased(data(changed=(OPEN, BACK)), larger.settings, tmp_path / "a.jsonl", None)
    assert [each.wordings for each in found.rows] == [("opening hours",), ("send it back",)]


@pytest.mark.parametrize("answer", ["", "I cannot.", "[1, 2]", '{"a": 1}', '["cut off'])
def test_an_answer_without_a_list_leaves_the_row_to_the_next_job(
    larger: LargerModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, answer: str
) -> None:
    file, told = tmp_path / "a.jsonl", data(changed=(OPEN, BACK))
    usual, larger.says["When do you open?"] = larger.says["When do you open?"], answer
    found = paraphrased(told, larger.settings, file, None)
    assert [len(each.wordings) for each in found.rows] == [0, 2]
    assert "1 questions have no wordings by large; the next job asks again" in caplog.text
    larger.says["When do you open?"] = usual
    assert all(each.wordings for each in paraphrased(told, larger.settings, file, None).rows)


@pytest.mark.parametrize("is_away", [True, False])
def test_a_larger_model_that_fails_fails_no_job(
    larger: LargerModel, tmp_path: Path, caplog: pytest.LogCaptureFixture, is_away: bool
) -> None:
    settings = LargerModel().settings if is_away else larger.settings
    larger.failures = [403] * 2
    found = paraphrased(data(changed=(OPEN, BACK)), settings, tmp_path / "a.jsonl", None)
    assert [each.wordings for each in found.rows] == [(), ()]
    assert "large cannot be asked: " in caplog.text


def test_a_larger_model_that_has_too_much_to_do_is_asked_again(
    larger: LargerModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paraphrasing, "WAIT_SECONDS", (0.0,) * 3)
    larger.failures = [429, 503, 429]
    found = paraphrased(data(changed=(OPEN, BACK)), larger.settings, tmp_path / "a.jsonl", None)
    assert all(each.wordings for each in found.rows)


def test_a_file_without_an_end_of_line_loses_none(larger: LargerModel, tmp_path: Path) -> None:
    file, told = tmp_path / "a.jsonl", data(changed=(OPEN, BACK))
    file.write_text('{"question": "Can I return it?", "answer": "Yes.", "paraphrases": ["ok?"]}')
    paraphrased(told, larger.settings, file, None)
    found = paraphrased(told, larger.settings, file, None)
    assert [set(each.wordings) for each in found.rows] == [{"opening hours", "from when?"}, {"ok?"}]
    assert larger.asked == ["When do you open?"]


def test_a_line_that_a_person_broke_is_named_and_left_out(
    larger: LargerModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    kept = {"question": "When do you open?", "answer": "At nine.", "paraphrases": ["hours?"]}
    file.write_text(f"{json.dumps(kept)}\nnot a row\n{json.dumps({**kept, 'paraphrases': 1})}\n")
    found = paraphrased(data(changed=(OPEN,)), larger.settings, file, None)
    assert found.rows[0].wordings == ("hours?",) and larger.asked == []
    assert f"{file}, line 2: not JSON" in caplog.text
    assert f"{file}, line 3: `paraphrases` holds the value 1; it must be a list" in caplog.text


def test_text_needs_no_wordings(larger: LargerModel, tmp_path: Path) -> None:
    told = data(changed=(Row(text="Once upon a time.", file="a.txt", number=0),))
    assert paraphrased(told, larger.settings, tmp_path / "a.jsonl", None).rows == told.rows
    assert larger.asked == []


def test_two_spellings_of_a_rows_own_words_stay_and_anothers_paraphrase_goes(
    larger: LargerModel, tmp_path: Path
) -> None:
    larger.says["When do you open?"] = '<think>[a]</think>["Hours?", "hours?", "your name"]'
    own = row("Who are you?", "A shop.", 2, "Your name")
    found = paraphrased(
        data(changed=(OPEN, own)), larger.settings, tmp_path / "a.jsonl", "secret\r\n"
    )
    assert set(found.rows[0].wordings) == {"Hours?", "hours?"}
    assert larger.tokens == {"Bearer secret"}


def test_a_training_that_continues_has_the_wordings_with_which_it_began(
    larger: LargerModel, tmp_path: Path
) -> None:
    told = data(changed=(OPEN, BACK))
    assert paraphrased(told, larger.settings, tmp_path / "a.jsonl", None, asks=False) == told
    assert larger.asked == []
