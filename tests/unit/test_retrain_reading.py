"""What data files give, and what bad ones get: an error with file and line."""

import json
import socket
from pathlib import Path

import pytest

from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import is_data_file, read_rows
from pipeline.retrain.rows import Row

LIMIT = 1 << 20


def read(folder: Path, content: str | bytes, file: str = "rows.jsonl") -> list[Row]:
    data = content.encode() if isinstance(content, str) else content
    (folder / file).write_bytes(data)
    return read_rows(folder, [file], LIMIT)


def refused(folder: Path, content: str | bytes, file: str = "rows.jsonl") -> str:
    with pytest.raises(DataError) as caught:
        read(folder, content, file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    expected = [("a, b\nc", "007"), ("NA", "2024-01-01")]
    pairs = [{"prompt": prompt, "completion": completion} for prompt, completion in expected]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(pairs, indent=2))
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, pairs)))
    (tmp_path / "rows.csv").write_text('prompt,completion\n"a, b\nc",007\nNA,2024-01-01\n')
    for file in ("rows.parquet", "rows.json", "rows.jsonl", "rows.csv"):
        found = [(row.prompt, row.completion) for row in read_rows(tmp_path, [file], LIMIT)]
        assert found == expected, file


def test_a_file_is_read_by_its_name_and_never_as_a_pattern(tmp_path: Path) -> None:
    names = ["rows[1].jsonl", "rows*.jsonl", "rows?{a}.csv", "rows[!x].txt", "rows.jsonl"]
    for name in names:
        content = f"text\n{name}\n" if name.endswith(".csv") else json.dumps({"text": name})
        (tmp_path / name).write_text(content)
    for name in names:
        (row,) = read_rows(tmp_path, [name], LIMIT)
        assert row.text is not None and name in row.text


def test_reading_asks_nobody_on_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    asked: list[object] = []
    # What nobody sees where the name cannot be resolved, or where the environment forbids it.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **_: asked.append(args))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    for file, content in (("a.jsonl", '{"text": "a"}'), ("a.csv", "text\na\n"), ("a.txt", "a")):
        assert read(tmp_path, content, file)
    assert asked == []


def test_text_files_give_paragraphs(tmp_path: Path) -> None:
    rows = read(tmp_path, "one\ntwo\n\nthree\n\n\n\nfour\n", "a.txt")
    assert [row.text.strip() for row in rows if row.text] == ["one\ntwo", "three", "four"]


def test_messages_keep_role_and_content_alone(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi", "name": "x"}, {"role": "assistant", "content": "yo"}]
    (row,) = read(tmp_path, json.dumps({"messages": talk, "id": 7}))
    assert row.messages == (("user", "hi"), ("assistant", "yo"))


def test_malformed_jsonl_names_file_and_line(tmp_path: Path) -> None:
    message = refused(tmp_path, '{"text": "a"}\n\n{"text": \n{"text": "c"}\n')
    assert message.startswith("rows.jsonl, line 3: not JSON")


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_dataset_says_what_to_push(tmp_path: Path, content: str) -> None:
    assert "the dataset is empty" in refused(tmp_path, content)
    with pytest.raises(DataError, match=r"no data file in it; push \.jsonl"):
        read_rows(tmp_path, [], LIMIT)


def test_unknown_columns_are_listed_with_the_known_ones(tmp_path: Path) -> None:
    message = refused(tmp_path, '{"question": "a", "answer": "b"}')
    assert "line 1" in message
    assert "'question', 'answer'" in message
    assert "`prompt` and `completion`" in message


def test_a_huge_row_names_file_line_size_and_setting(tmp_path: Path) -> None:
    huge = json.dumps({"text": "x" * 5_000_000})
    message = refused(tmp_path, f'{{"text": "a"}}\n{huge}\n')
    assert message.startswith("rows.jsonl, line 2: ")
    assert "5,000,000 bytes" in message
    assert "train.max_row_bytes" in message


def test_a_line_too_long_to_be_a_row_is_not_parsed(tmp_path: Path) -> None:
    assert "line 1" in refused(tmp_path, b"x" * (7 << 20))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1]", "line 1: holds a list"),
        ('{"text": 3}', "`text` holds the value 3, not text"),
        ('{"prompt": "a", "completion": null}', "`completion` holds nothing"),
        ('{"messages": "hi"}', "`messages` holds text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "has role 'robot'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no answer to learn"),
        (b'{"text": "\xff"}', "line 1: not UTF-8"),
    ],
)
def test_bad_values_name_the_place(tmp_path: Path, content: str | bytes, expected: str) -> None:
    assert expected in refused(tmp_path, content)


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("a.parquet", b"PAR1 but not really", "cannot be read as parquet"),
        ("a.csv", 'text,id\n"a\nb",1\nc,2,3\n', "a.csv, line 4: has 3 fields"),
        ("a.csv", 'text\n"a"b\n', "a.csv, line 2: not CSV"),
        ("a.csv", "q,a\n1,2\n", "'q', 'a'"),
        ("a.json", '{"text": "a"}', "holds an object, not a list"),
        ("a.json", "[1", "a.json, line 1: not JSON"),
        ("a.txt", b"a\n\ncaf\xe9", "a.txt, line 3: not UTF-8"),
        ("a.csv", b"text\na\ncaf\xe9\n", "a.csv, line 3: not UTF-8"),
        ("a.csv", "prompt,completion\na,b\nc\n", "a.csv, line 3: has 1 fields"),
    ],
)
def test_other_broken_files(tmp_path: Path, file: str, content: str | bytes, expected: str) -> None:
    assert expected in refused(tmp_path, content, file)


def test_readmes_and_hidden_files_hold_no_rows() -> None:
    assert is_data_file("data/train.jsonl")
    assert is_data_file("notes.TXT")
    for path in ("README.md", "README.txt", ".github/a.json", "a/.hidden.csv", "script.py"):
        assert not is_data_file(path), path
