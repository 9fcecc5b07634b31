"""Other wordings that a larger model gives, over HTTP."""

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain import paraphrasing
from pipeline.retrain.paraphrasing import paraphrased
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import ParaphraseSettings
from pipeline.retrain.wordings import Wordings
from tests.unit.test_retrain_plan import data
from tests.unit.test_wordings import row

OPEN, BACK = row("When do you open?", "At nine."), row("Can I return it?", "Yes.", 1)


class LargerModel(ThreadingHTTPServer):
    """Answers each question with the texts that a test has set for it. Refuses it if there are
    none."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.failures: list[int] = []
        """The status of the next answers, before the right ones."""
        self.says: dict[str, str] = {}
        self.asked: list[str] = []
        self.tokens: set[str | None] = set()

    @property
    def settings(self) -> ParaphraseSettings:
        return ParaphraseSettings(url=f"http://127.0.0.1:{self.server_port}/v1", model="large")


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        model = self.server
        assert isinstance(model, LargerModel) and self.path == "/v1/chat/completions"
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (message,) = request["messages"]
        (question,) = (each for each in model.says if f"Question: {each}\n" in message["content"])
        model.asked.append(question)
        model.tokens.add(self.headers["Authorization"])
        content = {"choices": [{"message": {"content": model.says[question]}}]}
        usual = 200 if model.says[question] else 400
        self.send_response(model.failures.pop(0) if model.failures else usual)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def larger() -> Iterator[LargerModel]:
    with LargerModel() as model:
        model.says = {
            "When do you open?": 'Sure:\n["opening hours", " from when? ", "opening hours"]',
            "Can I return it?": '["give it back", "send it back"]',
        }
        thread = threading.Thread(target=model.serve_forever)
        thread.start()
        yield model
        model.shutdown()
        thread.join()


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
    wordings = Wordings(found.rows, count=8, seed=0)
    asked, words = wordings.unseen(found.rows, ())
    trained, held_back = zip(*(each.wordings for each in found.rows), strict=True)
    assert {each.prompt for each in asked} == set(held_back)
    assert words == "generated"
    assert [each.prompt for each in wordings.trained(found.rows[0])] == [trained[0]]
    many = [replace(each, generated=("one?", "two?", "three?", "four?")) for each in found.rows]
    some = Wordings(many, count=2, seed=0)
    assert [each.prompt for each in some.trained(many[0])] == ["one?", "two?"]
    without = Wordings(found.rows, count=0, seed=0)
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
    settings, larger.failures = larger.settings, [403] * 2
    if is_away:
        settings = ParaphraseSettings(url="http://127.0.0.1:9/v1", model="large")
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
    file.write_text(f"{json.dumps(kept)}\nnot a row\n")
    found = paraphrased(data(changed=(OPEN,)), larger.settings, file, None)
    assert found.rows[0].wordings == ("hours?",) and larger.asked == []
    assert "this line is no row with `paraphrases`: not a row" in caplog.text


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
