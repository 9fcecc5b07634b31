"""Single rows of data files are changed, and all others stay exactly as they are in their file."""

from pathlib import Path

import pytest

from pipeline.retrain.dataset import read_dataset
from pipeline.retrain.editing import as_texts, from_texts, record_at, teach, with_row
from pipeline.retrain.errors import DataError
from pipeline.retrain.settings import DataSettings

ROW = {"question": "Q?", "answer": "So."}
JSON = '{"question": "Q?", "answer": "So."}'


@pytest.mark.parametrize(
    ("file", "before", "line", "record", "after"),
    [
        (
            "a.csv",
            "A;b\r\n1;2\r\n;;\r\n3;4",
            2,
            {"A": "x\ny", "b": ""},
            'A;b\r\n"x\r\ny";\r\n;;\r\n3;4',
        ),
        ("a.csv", "\ufeffq,a\n1,2\n", 2, None, "\ufeffq,a\n"),
        ("a.csv", "q,a", None, {"a": "2"}, "q,a\n,2\n"),
        ("a.tsv", "", None, ROW, "question\tanswer\nQ?\tSo.\n"),
        ("a.csv", 'q,a\n"1\n\n",2\n3,4\n', 2, {"q": "1", "a": "2"}, "q,a\n1,2\n3,4\n"),
        ("a.jsonl", '{"a": 1}\r\n\r\n{"b": 1}', 1, ROW, JSON + '\r\n\r\n{"b": 1}'),
        ("a.jsonl", '{"b": 1}', None, {"q": "\ud800é"}, '{"b": 1}\n{"q": "\\ud800é"}\n'),
        ("a.txt", "a\n\n\nb\nc\n\nd", 4, {"text": "B"}, "a\n\n\nB\n\nd"),
        ("a.txt", "a", None, {"text": "b"}, "a\n\nb\n"),
        ("a.txt", "", None, {"text": "b"}, "b\n"),
    ],
)
def test_a_row_is_changed_and_the_rows_beside_it_stay(
    tmp_path: Path, file: str, before: str, line: int, record: dict[str, str], after: str
) -> None:
    (tmp_path / file).write_bytes(before.encode())
    assert with_row(tmp_path, file, line, record).decode() == after


@pytest.mark.parametrize(
    ("file", "before", "said"),
    [
        ("a.txt", "", "its columns are text, not question, answer"),
        ("a.csv", "q,a\n", "its columns are q, a, not question, answer"),
        ("a.json", "[]", "it is one list"),
    ],
)
def test_a_file_takes_no_row_that_would_be_lost(
    tmp_path: Path, file: str, before: str, said: str
) -> None:
    (tmp_path / file).write_text(before)
    with pytest.raises(DataError, match=said):
        with_row(tmp_path, file, None, ROW)


def test_a_form_shows_each_value_and_an_untouched_one_stays_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"a": "é", "b": ["it\'s é"], "c": "\\ud800"}')
    (tmp_path / "a.csv").write_text("q,a\n")
    old = record_at(tmp_path, "a.jsonl", 1)
    shown = {"a": "é", "b": '["it\'s é"]', "c": '"\\ud800"'}
    assert (as_texts(old), from_texts(shown, old)) == (shown, old)
    assert record_at(tmp_path, "a.csv", None) == {"q": "", "a": ""}


A, B = '{"q": "z", "a": "no", "topic": "no"}\n', '{"q": "z", "a": "maybe"}\n'
TEXT, ADDED = '{"text": "x"}\n', '{"question": "z", "answer": "yes"}\n'
TALK = """\
{"messages": [{"role": "user", "content": "z"}, {"role": "assistant", "content": "no"}]}
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"f.jsonl": A + B, "g.jsonl": B},
            {"f.jsonl": A.replace("no", "yes", 1) + B.replace("maybe", "yes")},
        ),
        ({"f.jsonl": A.replace("z", "no")}, {"answers.jsonl": ADDED}),
        ({"f.jsonl": TEXT}, {"answers.jsonl": ADDED}),
        ({"answers.jsonl": TEXT}, {"answers.jsonl": ADDED}),
        ({"f.jsonl": TALK}, {"f.jsonl": TALK.replace("no", "yes")}),
        ({"f.csv": "q,a,more\nz,no,no\n"}, {"f.csv": "z,yes,no\n"}),
        (
            {"f.jsonl": '{"prompt": "no", "completion": "no"}\n' + TEXT},
            {"answers.jsonl": '{"prompt": "z", "completion": "yes"}\n'},
        ),
    ],
)
def test_an_answer_is_taught(tmp_path: Path, before: dict[str, str], after: dict[str, str]) -> None:
    for file, text in before.items():
        (tmp_path / file).write_text(text)
    settings = DataSettings.model_validate({"columns": {"question": "q", "answer": "a"}})
    dataset = read_dataset(tmp_path, before, settings)
    taught = teach(tmp_path, dataset, settings, "z", "yes")
    assert taught.keys() >= after.keys()
    for file, text in after.items():
        assert taught[file].decode().endswith(text)
    rows = read_dataset(tmp_path, {*before, *taught}, settings).train
    assert {row.answer for row in rows if row.last_question == "z"} == {"yes"}


def test_an_answer_in_a_file_that_no_job_reads_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text(TEXT)
    settings = DataSettings(files=("f.jsonl",))
    dataset = read_dataset(tmp_path, {"f.jsonl"}, settings)
    with pytest.raises(DataError, match=r"would not learn this answer from a row of answers.jsonl"):
        teach(tmp_path, dataset, settings, "z", "yes")
