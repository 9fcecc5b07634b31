"""What data files give, and what bad ones get: an error with file and line."""

import gzip
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from pipeline.retrain.dataset import check_not_empty, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Row, difference
from pipeline.retrain.settings import DataSettings


def read(folder: Path, content: str | bytes, file: str = "rows.jsonl") -> tuple[Row, ...]:
    data = content.encode() if isinstance(content, str) else content
    (folder / file).write_bytes(data)
    return rows_of(folder, file)


def rows_of(folder: Path, *files: str) -> tuple[Row, ...]:
    dataset = read_dataset(folder, files, DataSettings())
    check_not_empty(dataset)
    return dataset.train


def refused(folder: Path, content: str | bytes, file: str = "rows.jsonl") -> str:
    with pytest.raises(DataError) as caught:
        read(folder, content, file)
    message = str(caught.value)
    assert "\n" not in message
    return message


def zstd(data: bytes) -> bytes:
    import pyarrow

    compressed: bytes = pyarrow.compress(data, codec="zstd", asbytes=True)
    return compressed


def test_every_format_gives_the_same_rows(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    expected = [("a, b\nc", "007"), ("NA", "2024-01-01")]
    pairs = [{"prompt": prompt, "completion": completion} for prompt, completion in expected]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(pairs), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(pairs, indent=2))
    (tmp_path / "rows.jsonl").write_text("\n\n".join(map(json.dumps, pairs)))
    lines = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.ndjson").write_bytes(lines)
    (tmp_path / "lines.json").write_bytes(lines)
    (tmp_path / "rows.csv").write_text('prompt,completion\n"a, b\nc",007\nNA,2024-01-01\n')
    (tmp_path / "rows.tsv").write_text('prompt\tcompletion\n"a, b\nc"\t007\nNA\t2024-01-01\n')
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines))
    (tmp_path / "rows.CSV.zst").write_bytes(zstd((tmp_path / "rows.csv").read_bytes()))
    for file in sorted(path.name for path in tmp_path.iterdir()):
        found = [(row.prompt, row.completion) for row in rows_of(tmp_path, file)]
        assert found == expected, file


def test_a_file_is_read_by_its_name_and_never_as_a_pattern(tmp_path: Path) -> None:
    names = ["rows[1].jsonl", "rows*.jsonl", "rows?{a}.csv", "rows[!x].txt", "rows.jsonl"]
    for name in names:
        content = f"text\n{name}\n" if name.endswith(".csv") else json.dumps({"text": name})
        (tmp_path / name).write_text(content)
    for name in names:
        (row,) = rows_of(tmp_path, name)
        assert row.text is not None and name in row.text


def test_columns_of_a_table_that_nobody_needs_are_not_read(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    image = {"bytes": b"\x89PNG", "path": "a.png"}
    talk = [
        {"role": "user", "content": "hi", "image": image},
        {"role": "assistant", "content": "yo", "image": None},
    ]
    rows: list[dict[str, Any]] = [
        {"Question": "hi", "answer": "yo", "image": image, "price": Decimal("1.5")},
        {"messages": talk, "price": Decimal("1.5")},
    ]
    for row in rows:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "a.parquet")
        (found,) = rows_of(tmp_path, "a.parquet")
        assert [turn.answer for turn in found.turns] == ["yo"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("a.csv", 'question;answer\n"When, or ""if""?";"At 9; or\n10"\n'),
        ("a.csv", '"question"|"answer"\n"When, or ""if""?"|"At 9; or\n10"\n'),
        ("a.tsv", 'question,answer\n"When, or ""if""?","At 9; or\n10"\n'),
        ("a.csv", '\ufeffid,question,answer,\n1,"When, or ""if""?","At 9; or\n10",\n,,,\n , ,,\n'),
        ("a.csv", 'Question;Answer;;\n;;;\n"When, or ""if""?";"At 9; or\n10";;\n;;;\n;;\n'),
    ],
)
def test_spreadsheets_are_read_as_they_are_saved(tmp_path: Path, file: str, content: str) -> None:
    (row,) = read(tmp_path, content, file)
    assert [(turn.asked, turn.answer) for turn in row.turns] == [
        ('When, or "if"?', "At 9; or\n10"),
    ]


def test_a_single_column_is_not_cut_at_what_might_separate_others(tmp_path: Path) -> None:
    rows = read(tmp_path, "text\nHello, you; there|\n", "a.tsv")
    assert [row.text for row in rows] == ["Hello, you; there|"]
    rows = read(tmp_path, "text\nHello; you|\tthere\n", "a.csv")
    assert [row.text for row in rows] == ["Hello; you|\tthere"]


def test_messages_keep_what_a_template_reads(tmp_path: Path) -> None:
    talk = [{"role": "user", "content": "hi", "name": "x"}, {"role": "assistant", "content": "yo"}]
    sent = [{**each, "id": at, "timestamp": None, "weight": 1} for at, each in enumerate(talk)]
    plain, row = read(
        tmp_path, f"{json.dumps({'messages': talk})}\n{json.dumps({'messages': sent})}"
    )
    assert row.messages == tuple(talk)
    assert row.digest == plain.digest, "an export of the same conversation is the same row"
    assert row.place == "rows.jsonl, line 2"


def test_what_follows_the_last_answer_is_no_part_of_the_row(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    thanks = [{"role": "user", "content": "Thanks!"}, {**turns[1], "weight": 0}]
    rows = [{"messages": [*turns, *more]} for more in ([], thanks[:1], thanks)]
    found = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert len({row.digest for row in found}) == 1
    assert [row.taught for row in found] == [tuple(turns)] * 3


def talk(*answers: dict[str, Any]) -> str:
    turns = [{"role": "user", "content": "q"}]
    return json.dumps({"messages": [each for answer in answers for each in (*turns, answer)]})


@pytest.mark.parametrize(
    "key", [{"weight": 0}, {"train": False}, {"trainable": "false"}, {"training": 0.0}]
)
def test_a_turn_that_its_author_masks_is_context(tmp_path: Path, key: dict[str, Any]) -> None:
    bad = {"role": "assistant", "content": "bad", **key}
    good = {"role": "assistant", "content": "good", "weight": 1, "train": None}
    (row,) = read(tmp_path, talk(bad, good))
    assert [turn.answer for turn in row.turns] == ["good"]
    (other,) = read(tmp_path, talk({**bad, **dict.fromkeys(key, 1)}, good))
    assert other.digest != row.digest, "it is trained on another answer"
    gone = difference([other], [row])
    assert len(gone.edited) == 1
    assert "rows.jsonl, line 1 has nothing to learn" in refused(tmp_path, talk(bad, bad))


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"prompt": "q", "completion": "a"}, {"label": False}),
        ({"question": "q", "answer": "a"}, {"label": "False"}),
        ({"instruction": "q", "output": "a"}, {"trainable": 0}),
        ({"text": "a"}, {"train": "false"}),
        (json.loads(talk({"role": "assistant", "content": "a"})), {"label": 0}),
    ],
)
def test_a_row_that_its_author_does_not_want_learned_is_left_out(
    tmp_path: Path, row: dict[str, Any], key: dict[str, Any]
) -> None:
    yes = dict.fromkeys(key, True)
    rows = [{**row, **key}, {**row, **yes}, {**row, **dict.fromkeys(key)}]
    found = read(tmp_path, "\n".join(map(json.dumps, rows)))
    assert [each.line for each in found] == [2, 3]


def test_a_label_of_a_text_and_a_name_of_a_class_mean_nothing_else(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"text": "a", "label": 0},
        {"prompt": "q", "completion": "a", "label": "card_arrival"},
    ]
    assert len(read(tmp_path, "\n".join(map(json.dumps, rows)))) == 2


@pytest.mark.parametrize(
    ("content", "key"),
    [
        (talk({"role": "assistant", "content": "a", "weight": 0.5}), "`weight` is 0.5"),
        (
            talk({"role": "assistant", "content": "a", "train_detail": [{}]}),
            "`train_detail` is",
        ),
        ('{"prompt": "q", "completion": "a", "label": 2}', "`label` is 2"),
        ('{"text": "a", "trainable": "maybe"}', "`trainable` is 'maybe'"),
    ],
)
def test_a_word_against_learning_that_is_not_understood_is_named(
    tmp_path: Path, content: str, key: str
) -> None:
    message = refused(tmp_path, content)
    assert f"line 1: {key}" in message and "may say that this is not to be learned" in message


def test_malformed_jsonl_names_file_and_line(tmp_path: Path) -> None:
    message = refused(tmp_path, '{"text": "a"}\n\n{"text": \n{"text": "c"}\n')
    assert message.startswith("rows.jsonl, line 3: not JSON (Expecting value at character 9);")


def test_half_a_character_names_its_row(tmp_path: Path) -> None:
    wolf = {"prompt": "\U0001f43a", "completion": "wolf", "id": "\ud83d"}  # `id` is not read
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "\ud83d"}]
    for row in ({"text": "cut \ud83d"}, {"messages": talk}):
        message = refused(tmp_path, f"{json.dumps(wolf)}\n{json.dumps(row)}")
        assert message.startswith("rows.jsonl, line 2: ")
        assert r"can't encode character '\ud83d'" in message


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_dataset_says_what_to_push(tmp_path: Path, content: str) -> None:
    assert "the dataset is empty" in refused(tmp_path, content)
    with pytest.raises(DataError, match=r"the dataset is empty; push \.jsonl"):
        rows_of(tmp_path)


@pytest.mark.parametrize("file", ["rows.jsonl", "rows.csv", "rows.txt"])
def test_a_row_may_be_huge(tmp_path: Path, file: str) -> None:
    huge = "x" * 5_000_000
    content = {"rows.jsonl": json.dumps({"text": huge}), "rows.csv": f"text\n{huge}\n"}
    (row,) = read(tmp_path, content.get(file, huge), file)
    assert row.text == huge


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("[1]", "line 1: holds a list"),
        ('{"text": 3}', "`text` holds the value 3, not text"),
        ('{"prompt": "a", "completion": null}', "`completion` holds nothing"),
        ('{"messages": "hi"}', "`messages` holds text"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "has role 'robot'"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "no answer to learn"),
        (
            '{"messages": [{"role": "assistant", "content": "x", "tool_calls": 5}]}',
            "line 1: message 1 (assistant): `tool_calls` is not a list of objects",
        ),
        (
            '{"messages": [{"role": "user", "text": "q"}, {"role": "assistant", "content": "a"}]}',
            "has role 'user' with nothing as content",
        ),
        (b'{"text": "\xff"}', "rows.jsonl: not UTF-8 text (invalid start byte in b"),
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
        (
            "a.csv",
            'text\na\n"never closed\nb\nc\n',
            "a.csv, line 3: not CSV with ',' between the fields (unexpected end of data in the row",
        ),
        (
            "a.csv",
            "id,Answer,question,answer \n1,,q,a\n",
            "a.csv, line 1: the columns 2 and 4 are both called 'answer '; rename one of them",
        ),
        (
            "a.jsonl",
            '{"question": "q", "answer": "a", "answer": ""}',
            "a.jsonl, line 1: not JSON (the columns 2 and 3 are both called 'answer'",
        ),
        ("a.json", '{\n"text": "a"\n}', "a.json, line 1: not JSON"),
        ("a.json", '{"a": 1}', "a.json, line 1: nothing to learn from in the columns 'a'"),
        ("a.json", "[1", "a.json: not JSON (Expecting ',' delimiter: line 1 column 3"),
        ("a.json", "[1]", "a.json, row 1: holds the value 1, not an object"),
        ("a.txt", b"a\n\ncaf\xe9", "a.txt: not UTF-8"),
        (
            "a.csv",
            "prompt,completion\na,b\nc\n",
            "a.csv, line 3: has 1 field where the header has 2",
        ),
    ],
)
def test_other_broken_files(tmp_path: Path, file: str, content: str | bytes, expected: str) -> None:
    assert expected in refused(tmp_path, content, file)


def test_a_text_is_a_paragraph_and_names_the_line_that_it_begins_on(tmp_path: Path) -> None:
    rows = read(tmp_path, "one\ntwo\n\n\nthree\n\nfour", "a.txt")
    assert [row.text.strip() for row in rows if row.text] == ["one\ntwo", "three", "four"]
    assert [row.place for row in rows] == ["a.txt, line 1", "a.txt, line 5", "a.txt, line 7"]


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"


@pytest.mark.parametrize("file", ["a.txt", "a.jsonl", "a.csv", "a.parquet", "a.json.gz"])
def test_a_pointer_of_git_lfs_is_not_learned(tmp_path: Path, file: str) -> None:
    content = gzip.compress(POINTER.encode()) if file.endswith(".gz") else POINTER
    message = refused(tmp_path, content, file)
    assert message.startswith(f"{file}: a pointer of Git LFS, not the content; push the content")


def test_a_file_that_is_not_compressed_as_its_name_says(tmp_path: Path) -> None:
    assert "a.jsonl.gz: cannot be read as gzip" in refused(tmp_path, '{"text": "a"}', "a.jsonl.gz")
    cut = zstd(b'{"text": "a"}' * 99)[:-4]
    assert "a.jsonl.zst: cannot be read as zstd" in refused(tmp_path, cut, "a.jsonl.zst")


def test_all_bad_rows_are_found_where_they_are_asked_for(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', "{", '{"text": 1}', '{"no": "b"}', '{"text": "c"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.csv").write_text("text,id\nd,1\ne\nf,2\n")
    (tmp_path / "c.json").write_text("{")
    found: list[DataError] = []
    dataset = read_dataset(
        tmp_path, ["a.jsonl", "b.csv", "c.json"], DataSettings(), on_error=found.append
    )
    assert [row.text for row in dataset.train] == ["a", "c", "d", "f"]
    places = [str(error).split(":")[0] for error in found]
    assert places == [
        *("a.jsonl, line 2", "a.jsonl, line 3", "a.jsonl, line 4"),
        *("b.csv, line 3", "c.json, line 1"),
    ]


def test_tables_and_lines_give_the_same_conversation(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    call = {"function": {"name": "f", "arguments": {"a": "1"}}}
    other = {"function": {"name": "g", "arguments": {"b": "2"}}}
    talks = [
        [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "", "tool_calls": [each]},
            {"role": "tool", "content": "3", "name": "f"},
            {"role": "assistant", "content": "three"},
        ]
        for each in (call, other)
    ]
    rows = [{"messages": talk} for talk in talks]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    digests = [row.digest for row in rows_of(tmp_path, "a.parquet", "b.jsonl")]
    assert digests[:2] == digests[2:]


def test_an_empty_prompt_is_refused_because_no_server_answers_it(tmp_path: Path) -> None:
    expected = "`prompt` is empty, and a server answers no empty prompt; write text rows as `text`"
    good = '{"prompt": "q", "completion": "a"}\n'
    assert refused(tmp_path, f'{good}{{"prompt": "", "completion": "x"}}') == (
        f"rows.jsonl, line 2: {expected}"
    )
    assert refused(tmp_path, "prompt,completion\nq,a\n,x\n", "rows.csv") == (
        f"rows.csv, line 3: {expected}"
    )
    answer = '[{"role": "assistant", "content": "hello"}]'
    assert expected in refused(tmp_path, f'{{"prompt": [], "completion": {answer}}}')


def test_a_link_as_a_commit_stores_it_is_refused_by_its_name(tmp_path: Path) -> None:
    """A checkout without links holds the path of the target."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows.txt").write_text("words\n")
    (tmp_path / "a.txt").write_text("data/rows.txt")
    (tmp_path / "data" / "b.txt").write_text("../data/rows.txt")
    for file in ("a.txt", "data/b.txt"):
        with pytest.raises(DataError, match=f"^{file}: it is a symbolic link to data/rows.txt; "):
            rows_of(tmp_path, "data/rows.txt", file)
    (tmp_path / "a.txt").write_text("data/rows.txt\n")
    assert len(rows_of(tmp_path, "data/rows.txt", "a.txt")) == 2, "a line, so a text"
