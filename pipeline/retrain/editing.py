"""Changes single rows of data files. All other rows stay exactly as they are in their file."""

import csv
import io
import json
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from pipeline.retrain.columns import Columns
from pipeline.retrain.dataset import Dataset, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import Unreadable, records, separator_of, suffix_of
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings

ANSWERS_FILE = "answers.jsonl"
"""A new answer goes to this file if no file of the dataset has rows like it."""


def record_at(folder: Path, file: str, line: int | None) -> Columns:
    """The columns of the row that begins on this line, as they stand in the file. Without a line,
    those of the file's first row, or a question and an answer if it has none. Raises DataError."""
    for start, _, record in _placed(folder, file) if (folder / file).is_file() else ():
        if line in (start, None) and not isinstance(record, str):
            return record
    if line is not None:
        raise DataError.at(file, line, "no row that can be edited begins here; reload the page")
    return {"question": "", "answer": ""}


def from_texts(texts: Mapping[str, str], like: Columns) -> Columns:
    """A record with these texts as values. Where `like` has no text, the text is JSON. Raises
    DataError."""
    try:
        return {
            name: text if isinstance(like.get(name, ""), str) else json.loads(text)
            for name, text in texts.items()
        }
    except ValueError as error:
        raise DataError(f"a column that is no text must be JSON ({error}); correct it") from None


def with_row(folder: Path, file: str, line: int | None, record: Columns | None) -> str:
    """The text of the file with this record in the place of the row that begins on `line`. A record
    of None deletes the row; a line of None adds a row at the end. Raises DataError."""
    if (folder / file).is_dir():
        raise DataError.at(file, None, "it is a folder; name a file in it")
    (folder / file).parent.mkdir(parents=True, exist_ok=True)
    (folder / file).touch()
    placed = list(_placed(folder, file))
    with (folder / file).open(encoding="utf-8", newline="") as text:
        lines = text.readlines()
    if lines and not placed:
        raise DataError.at(file, None, "no row can be added to a file of this form; name another")
    begin = end = len(lines) + 1
    if line is not None:
        begin, end = next(
            ((start - 1, stop) for start, stop, _ in placed if start == line), (begin, end)
        )
    elif lines and not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    if line is None and suffix_of(file) == ".txt":
        lines.append("\n")
    written = "" if record is None else _written(record, file, lines, placed)
    return "".join((*lines[:begin], written, *lines[end:]))


def teach(
    folder: Path, dataset: Dataset, settings: DataSettings, question: str, answer: str
) -> tuple[str, str]:
    """The name and the new text of the file that teaches this answer to the question. If a row has
    the question, its answer is replaced, because two answers would contradict each other. Otherwise
    a row is added, in the columns of the other rows. Raises DataError if no row can be added so
    that a job learns it."""
    files = {*dataset.by_file, *dataset.files.ignored}
    for file, text in _candidates(folder, dataset, question, answer):
        path = folder / file
        before = path.read_bytes() if path.exists() else b""
        path.write_text(text, encoding="utf-8", newline="")
        bad: list[DataError] = []
        rows = read_dataset(folder, {*files, file}, settings, bad.append).train
        if any(row.answer == answer and question in _questions(row) for row in rows):
            return file, text
        path.write_bytes(before)
    raise DataError(
        f"no file of the dataset takes the row, and a row in {ANSWERS_FILE} would not be read; add "
        "a row to one of the files by hand"
    )


def _candidates(
    folder: Path, dataset: Dataset, question: str, answer: str
) -> Iterator[tuple[str, str]]:
    """What might teach the answer, as a file and its new text, the best first."""
    rows = [row for row in dataset.train if row.line is not None and len(row.turns) == 1]
    for row in [row for row in rows if question in _questions(row)][:1]:
        assert row.line is not None
        record = _replaced(record_at(folder, row.file, row.line), {row.answer: answer})
        yield row.file, with_row(folder, row.file, row.line, record)
    for row in [row for row in reversed(rows) if row.last_question != row.answer][:1]:
        assert row.line is not None
        old = record_at(folder, row.file, row.line)
        new = _replaced(old, {row.answer: answer, row.last_question: question})
        # The other columns belong to the other row.
        record = {key: value for key, value in new.items() if value != old[key]}
        yield row.file, with_row(folder, row.file, None, record)
    if not (folder / ANSWERS_FILE).exists():
        record = {"question": question, "answer": answer}
        yield ANSWERS_FILE, json.dumps(record, ensure_ascii=False) + "\n"


def _questions(row: Row) -> tuple[str | None, ...]:
    return (row.last_question, *row.paraphrases)


def _placed(folder: Path, file: str) -> Iterator[tuple[int, int, Columns | str]]:
    """Each record, with the line on which it begins and the last one before the next record."""
    try:
        found = list(records(folder, file))
    except Unreadable as error:
        raise DataError.at(file, error.line, str(error)) from error
    with (folder / file).open(encoding="utf-8", newline="") as text:
        num_lines = sum(1 for _ in text)
    for (line, record), (after, _) in pairwise((*found, (num_lines + 1, ""))):
        if line is not None and after is not None:
            yield line, after - 1, record


def _written(
    record: Columns, file: str, lines: Collection[str], placed: Collection[tuple[int, int, Any]]
) -> str:
    suffix = suffix_of(file)
    if suffix == ".txt":
        return str(record["text"]).strip("\n") + "\n\n"
    if suffix not in (".csv", ".tsv"):
        return json.dumps(record, ensure_ascii=False) + "\n"
    header, row = next(iter(lines)), io.StringIO()
    [*_, (_, _, last)] = placed
    names = last if isinstance(last, Mapping) else record
    separator = separator_of(header, suffix)
    end = "\r\n" if header.endswith("\r\n") else "\n"
    csv.writer(row, delimiter=separator, lineterminator=end).writerow(
        record.get(name, "") for name in names
    )
    return row.getvalue()


def _replaced(value: Any, texts: Mapping[str | None, str | None]) -> Any:
    """The value of JSON with each text that is one of `texts` replaced."""
    if isinstance(value, str):
        return texts.get(value, value)
    if isinstance(value, list):
        return [_replaced(each, texts) for each in value]
    if isinstance(value, Mapping):
        return {key: _replaced(each, texts) for key, each in value.items()}
    return value
