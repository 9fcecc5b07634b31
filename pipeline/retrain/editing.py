"""Changes single rows of data files. All other rows stay exactly as they are in their file."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.retrain.columns import Columns, RowColumns
from pipeline.retrain.dataset import Dataset, read_dataset
from pipeline.retrain.errors import DataError
from pipeline.retrain.reading import Unreadable, csv_reader, records, row_of, suffix_of
from pipeline.retrain.rows import Row
from pipeline.retrain.settings import DataSettings

ANSWERS_FILE = "answers.jsonl"
"""New answers go to this file."""


def record_at(folder: Path, file: str, line: int | None) -> Columns:
    """The columns of the row that begins on this line, as they stand in the file. Without a line,
    those of a new row, without their texts: the columns of the file's first row, or else of its
    header, or a question and an answer. Raises DataError."""
    placed = _placed(folder, file, line)
    if line is not None:
        return placed[line][1]
    names = _names(file, _lines(folder, file)) or ("question", "answer")
    like = next((record for _, record in placed.values()), dict.fromkeys(names, ""))
    return {name: "" if isinstance(value, str) else value for name, value in like.items()}


def as_texts(record: Columns) -> dict[str, str]:
    """The values as a form shows them. A value that is no text is shown as JSON."""
    return {name: str(value) if _is_text(value) else _json(value) for name, value in record.items()}


def from_texts(texts: Mapping[str, str], like: Columns) -> Columns:
    """A record with these texts as values. Where `like` has no text, the text is JSON. Raises
    DataError."""
    try:
        return {
            name: text if _is_text(like.get(name, "")) else json.loads(text)
            for name, text in texts.items()
        }
    except ValueError as error:
        raise DataError(f"a column that is no text must be JSON ({error}); correct it") from None


def with_row(folder: Path, file: str, line: int | None, record: Columns | None) -> bytes:
    """The content of the file with this record in the place of the row that begins on `line`. A
    record of None deletes the row; a line of None adds a row at the end. Raises DataError."""
    if (folder / file).is_dir():
        raise DataError.at(file, None, "it is a folder; name a file in it")
    placed, lines = _placed(folder, file, line), _lines(folder, file)
    if lines and not placed and suffix_of(file) == ".json":
        raise DataError.at(
            file, None, "it is one list, whose rows cannot be changed here; edit it by hand"
        )
    line_end = "\r\n" if lines and lines[0].endswith("\r\n") else "\n"
    begin = end = len(lines)
    if line is not None:
        begin, end = line - 1, line - 1 + placed[line][0]
    elif lines:
        lines[-1] = lines[-1].rstrip("\r\n") + line_end * (2 if suffix_of(file) == ".txt" else 1)
    written = "" if record is None else _written(record, file, lines)
    written = written.replace("\r\n", "\n").replace("\n", line_end)
    return "".join((*lines[:begin], written, *lines[end:])).encode()


def teach(
    folder: Path, dataset: Dataset, settings: DataSettings, question: str, answer: str
) -> dict[str, bytes]:
    """The files that teach this answer to the question, with their new contents. In each row that
    has the question, the answer is replaced, because two answers would contradict each other. If
    there is none, a row is added to ANSWERS_FILE. Raises DataError if a job would not learn the
    answer so."""
    columns = RowColumns(settings.columns.model_dump(exclude_none=True))
    contents: dict[str, bytes] = {}
    for file, line, record in _edits(folder, dataset, columns, question, answer):
        contents[file] = with_row(folder, file, line, record)
        (folder / file).write_bytes(contents[file])
    files = {*dataset.by_file, *dataset.files.ignored, *contents}
    asked = _asked(read_dataset(folder, files, settings, lambda _: None), question)
    if asked and all(row.answer == answer for row in asked):
        return contents
    places = ", ".join(row.place for row in asked) or f"a row of {', '.join(contents)}"
    raise DataError(f"a job would not learn this answer from {places}; edit the rows by hand")


def _edits(
    folder: Path, dataset: Dataset, columns: RowColumns, question: str, answer: str
) -> Iterator[tuple[str, int | None, Columns]]:
    """The file, the line of the row (None adds one), and the new record."""
    asked = _asked(dataset, question)
    # The last row of a file first: its new answer may have more lines, which moves later rows.
    for row in reversed(asked):
        old = record_at(folder, row.file, row.line)
        yield row.file, row.line, _answered(old, row, answer, columns)
    if not asked:
        is_completion = any(row.prompt is not None for row in dataset.train)
        names = ("prompt", "completion") if is_completion else ("question", "answer")
        yield ANSWERS_FILE, None, dict(zip(names, (question, answer), strict=True))


def _asked(dataset: Dataset, question: str) -> list[Row]:
    """The rows that are this question and its answer."""
    return [
        row
        for row in dataset.train
        if len(row.turns) == 1 and question in (row.last_question, *row.paraphrases)
    ]


def _answered(record: Columns, row: Row, answer: str, columns: RowColumns) -> Columns:
    """The record of the row with one text in it replaced, so that the row has this answer. Other
    texts may be equal by chance. The record as it is if there is none."""
    text = json.dumps(record)
    for found in re.finditer(re.escape(json.dumps(row.answer)), text):
        with suppress(ValueError):
            changed = json.loads(text[: found.start()] + json.dumps(answer) + text[found.end() :])
            now = row_of(changed, columns, file="", number=0)
            if (now.last_question, now.answer) == (row.last_question, answer):
                return dict(changed)
    return record


def _lines(folder: Path, file: str) -> list[str]:
    """Empty if there is no such file."""
    content = (folder / file).read_bytes() if (folder / file).is_file() else b""
    return io.StringIO(content.decode(), newline="").readlines()


def _placed(folder: Path, file: str, line: int | None) -> dict[int, tuple[int, Columns]]:
    """The rows that can be edited: the first line of each → the number of its lines, and its
    columns. Raises DataError, also if none begins on `line`."""
    found = {}
    try:
        for begin, num_lines, record in records(folder, file) if (folder / file).is_file() else ():
            if begin is not None and not isinstance(record, str):
                found[begin] = num_lines, record
    except Unreadable as error:
        raise DataError.at(file, error.line, str(error)) from error
    if line is not None and line not in found:
        raise DataError.at(file, line, "no row that can be edited begins here; reload the page")
    return found


def _names(file: str, lines: Sequence[str]) -> list[str]:
    """The columns that each row of the file has. Empty if a row may have any."""
    if (suffix := suffix_of(file)) in (".csv", ".tsv"):
        return next(csv_reader(iter(lines), suffix), [])
    return ["text"] if suffix == ".txt" else []


def _written(record: Columns, file: str, lines: Sequence[str]) -> str:
    suffix, names = suffix_of(file), _names(file, lines)
    if names and not record.keys() <= {*names}:
        problem = f"its columns are {', '.join(names)}, not {', '.join(record)}; name another file"
        raise DataError.at(file, None, problem)
    if suffix == ".txt":
        return str(record.get("text", "")).strip("\n") + "\n"
    if suffix not in (".csv", ".tsv"):
        return _json(record) + "\n"
    text, dialect = io.StringIO(), csv_reader(iter(lines), suffix).dialect
    writer = csv.DictWriter(text, names or list(record), dialect=dialect)
    if not names:
        writer.writeheader()
    writer.writerow(record)
    return text.getvalue()


def _is_text(value: object) -> bool:
    """Not if it has half of a character, which only an escape of JSON can write."""
    return isinstance(value, str) and value.encode(errors="ignore").decode() == value


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False).encode(errors="backslashreplace").decode()
