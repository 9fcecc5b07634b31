"""Rows by whatever their columns are called."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain.dataset import read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import ColumnSettings, DataSettings


def read(folder: Path, record: dict[str, Any], **columns: str) -> Row:
    (folder / "a.jsonl").write_text(json.dumps(record))
    settings = DataSettings(columns=ColumnSettings(**columns))
    (row,) = read_dataset(folder, ["a.jsonl"], settings).train
    return row


def said(*turns: tuple[str, str]) -> tuple[dict[str, str], ...]:
    return tuple({"role": role, "content": content} for role, content in turns)


def test_settings_name_the_columns(tmp_path: Path) -> None:
    record = {"question": "2 + 2?", "answer": "4", "text": "not this one"}
    row = read(tmp_path, record, prompt="question", completion="answer")
    assert (row.prompt, row.completion, row.text) == ("2 + 2?", "4", None)
    assert read(tmp_path, {"body": "b", "messages": "x"}, text="body").text == "b"
    assert read(tmp_path, {"prompt": "p", "answer": "a"}, completion="answer").completion == "a"


def test_files_of_another_form_are_read_beside_named_columns(tmp_path: Path) -> None:
    assert read(tmp_path, {"text": "a"}, prompt="question", completion="answer").text == "a"


def test_columns_without_a_value_are_those_of_other_rows(tmp_path: Path) -> None:
    """A table with rows of several forms has all columns for each row."""
    empty = dict.fromkeys(("prompt", "completion", "messages", "instruction", "input", "output"))
    assert read(tmp_path, {**empty, "text": "a"}).text == "a"
    assert read(tmp_path, {**empty, "prompt": "q", "completion": "b"}).completion == "b"
    with pytest.raises(DataError, match="nothing to learn from in the columns"):
        read(tmp_path, empty)


def test_what_is_missing_is_told_with_the_settings(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"columns \'q\', \'a\'; the known .*are .*Alpaca.*question = "
    ):
        read(tmp_path, {"q": "1", "a": "2"})
    with pytest.raises(DataError, match=r'\[pipelines.data.columns\] says prompt = "question"'):
        read(tmp_path, {"q": "1", "completion": "2"}, prompt="question")


def test_alpaca(tmp_path: Path) -> None:
    record = {"instruction": "Add.", "input": "2 and 2", "output": "4", "text": "Below is an …"}
    assert read(tmp_path, record).messages == said(("user", "Add.\n\n2 and 2"), ("assistant", "4"))
    record = {"instruction": "Greet.", "input": "", "output": "Hi", "system": "Be brief."}
    assert read(tmp_path, record).messages == said(
        ("system", "Be brief."), ("user", "Greet."), ("assistant", "Hi")
    )
    with pytest.raises(DataError, match="line 1: `output` holds nothing"):
        read(tmp_path, {"instruction": "a", "output": None})
    for value in (7, False, ["x"], {"x": 1}):
        with pytest.raises(DataError, match=r"line 1: `input` holds (the value|a list|an object)"):
            read(tmp_path, {"instruction": "a", "input": value, "output": "b"})


@pytest.mark.parametrize(
    ("columns", "asked"),
    [
        ({"question": "q", "answer": "a", "category": "x"}, "q"),
        ({"Question": "q", " ANSWER ": "a", "prompt": None}, "q"),
        ({"prompt": "q", "response": "a"}, "q"),
        ({"input": "q", "output": "a"}, "q"),
        ({"query": "q", "answer": "a", "context": "", "text": "both"}, "q"),
        ({"instruction": "q", "context": "c", "response": "a"}, "q\n\nc"),
        ({"instruction": "", "input": "c", "output": "a"}, "c"),
    ],
)
def test_a_question_and_its_answer_are_a_conversation(
    tmp_path: Path, columns: dict[str, Any], asked: str
) -> None:
    assert read(tmp_path, columns).messages == said(("user", asked), ("assistant", "a"))


def test_settings_decide_what_is_the_question_and_whether_it_is_a_conversation(
    tmp_path: Path,
) -> None:
    record = {"question": "q", "answer": "short", "response": "long", "prompt": "p"}
    with pytest.raises(DataError, match=r"`question` and `prompt` may both be the question; name"):
        read(tmp_path, record)
    with pytest.raises(DataError, match=r"`answer` and `response` may both be the answer"):
        read(tmp_path, record, question="question")
    row = read(tmp_path, record, question="prompt", answer="response")
    assert row.messages == said(("user", "p"), ("assistant", "long"))
    raw = read(tmp_path, record, prompt="question", completion="answer")
    assert (raw.prompt, raw.completion, raw.messages) == ("q", "short", None)
    with pytest.raises(DataError, match="`question` is empty, so nobody can ask"):
        read(tmp_path, {"question": "", "answer": "a"})


FORMS: list[dict[str, Any]] = [
    {"messages": said(("user", "q"), ("assistant", "a"))},
    {"messages": json.dumps(said(("user", "q"), ("assistant", "a")))},
    {"prompt": "q", "completion": "a"},
    {"prompt": said(("user", "q")), "completion": said(("assistant", "a"))},
    {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    {"instruction": "q", "input": "", "output": "a"},
    {"question": "q", "answer": "a"},
]


@pytest.mark.parametrize("form", FORMS)
def test_system_and_history_are_used_in_all_forms(tmp_path: Path, form: dict[str, Any]) -> None:
    whole = said(
        *(("system", "s"), ("user", "1"), ("assistant", "2"), ("user", "q"), ("assistant", "a"))
    )
    pairs = [["1", "2"]]
    for history in (pairs, json.dumps(pairs), said(("user", "1"), ("assistant", "2"))):
        assert read(tmp_path, {**form, "system": "s", "history": history}).messages == whole
    assert read(tmp_path, {**form, "system_prompt": "s"}).messages == (whole[0], *whole[3:])
    plain = read(tmp_path, {**form, "system": None, "history": []})
    assert plain.as_completion == ("q", "a")
    for wrong in ({"system": 7}, {"history": "once"}, {"history": [["1", "2", "3"]]}):
        with pytest.raises(DataError, match=f"line 1: `{next(iter(wrong))}` h"):
            read(tmp_path, {**form, **wrong})


def test_two_system_prompts_are_named(tmp_path: Path) -> None:
    talk = said(("system", "s"), ("user", "q"), ("assistant", "a"))
    assert read(tmp_path, {"messages": talk, "system": "s"}).messages == talk
    with pytest.raises(DataError, match="`system` and the first message are two different"):
        read(tmp_path, {"messages": talk, "system": "t"})


def test_sharegpt(tmp_path: Path) -> None:
    turns = [("system", "s"), ("human", "q"), ("gpt", "a"), ("observation", "o"), ("gpt", "b")]
    with pytest.raises(DataError, match=r"line 1: a message is from \['human'\]; write one of"):
        read(tmp_path, {"conversations": [{"from": ["human"], "value": "q"}]})
    record = {"conversations": [{"from": who, "value": what} for who, what in turns], "id": 1}
    assert read(tmp_path, record).messages == said(
        ("system", "s"), ("user", "q"), ("assistant", "a"), ("tool", "o"), ("assistant", "b")
    )
    with pytest.raises(DataError, match="line 1: a message is from 'bing'; write one of human"):
        read(tmp_path, {"conversations": [{"from": "bing", "value": "x"}]})


def test_conversations_may_be_written_as_messages(tmp_path: Path) -> None:
    talk = said(("user", "q"), ("assistant", "a"))
    assert read(tmp_path, {"conversations": talk}).messages == talk


def test_tools_are_kept_as_json_or_as_they_are(tmp_path: Path) -> None:
    record: dict[str, Any] = {"messages": said(("user", "q"), ("assistant", "a"))}
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert read(tmp_path, {**record, "tools": tools}).tools == tuple(tools)
    assert read(tmp_path, {**record, "tools": json.dumps(tools)}).tools == tuple(tools)
    assert read(tmp_path, {**record, "tools": None}).tools is None
    assert read(tmp_path, {**record, "functions": tools}, tools="functions").tools == tuple(tools)
    for tools_of, words in (("{", "text that is not JSON"), ("[1]", "not a list of objects")):
        with pytest.raises(DataError, match=f"line 1: `tools` is {words}"):
            read(tmp_path, {**record, "tools": tools_of})


def test_other_wordings_stand_beside_a_question(tmp_path: Path) -> None:
    record = {"question": "Open?", "answer": "At 9.", "paraphrases": ["hours", "when", "hours"]}
    assert read(tmp_path, record).paraphrases == ("hours", "when")
    table = {"prompt": "Open?", "completion": " At 9.", "ways": '["hours"]'}
    assert read(tmp_path, table, paraphrases="ways").paraphrases == ("hours",)
    for nothing in (None, "", []):
        assert read(tmp_path, record | {"paraphrases": nothing}).paraphrases == ()


@pytest.mark.parametrize(
    ("record", "told"),
    [
        ({"question": "a", "answer": "b", "paraphrases": "hours"}, "holds text that is not JSON"),
        ({"question": "a", "answer": "b", "paraphrases": [3]}, "has the value 3 in it"),
        ({"question": "a", "answer": "b", "paraphrases": [" "]}, "has an empty text in it"),
        ({"text": "a", "paraphrases": ["b"]}, "stand beside no question that is text"),
    ],
)
def test_other_wordings_that_are_no_questions_are_told(
    tmp_path: Path, record: dict[str, Any], told: str
) -> None:
    with pytest.raises(DataError, match=told):
        read(tmp_path, record)
