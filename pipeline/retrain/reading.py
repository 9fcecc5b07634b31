"""Data files → rows, or an error that names the file and the line.

`datasets` reads the files, as streams, so that nothing is written to its cache. Of JSONL and CSV it
reads the lines, and the standard library what stands in them: its own readers of both guess types
(a date becomes a timestamp, "007" a number), fill up short rows and lose line numbers, and a row
must come out as it went in, or its hash means nothing.
"""

import csv
import glob
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Message, Row

if TYPE_CHECKING:
    import pyarrow

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".txt")
KNOWN_COLUMNS = "`text`, or `prompt` and `completion`, or `messages`"
ROLES = ("system", "user", "assistant")


def is_data_file(path: str) -> bool:
    """Whether a path in the repository holds rows: neither a README nor hidden."""
    parts = path.split("/")
    if any(part.startswith(".") for part in parts) or parts[-1].upper().startswith("README"):
        return False
    return path.lower().endswith(SUFFIXES)


def read_rows(folder: Path, files: Sequence[str], max_row_bytes: int) -> list[Row]:
    """The rows of `files`, which are relative to `folder`, in their order.

    Columns that nobody asks for are ignored. Raises DataError.
    """
    if not files:
        raise DataError(
            f"the dataset is empty: no data file in it; push {', '.join(SUFFIXES)} files with "
            f"{KNOWN_COLUMNS}"
        )
    rows = [row for file in files for row in _read_file(folder, file, max_row_bytes)]
    if not rows:
        raise DataError(
            f"the dataset is empty: no row in {', '.join(files[:5])}; push rows with "
            f"{KNOWN_COLUMNS}"
        )
    return rows


_Record = tuple[int | None, Mapping[str, object]]
"""Line, where it is known, and the columns."""


def _read_file(folder: Path, file: str, max_row_bytes: int) -> Iterator[Row]:
    path, suffix = folder / file, Path(file).suffix.lower()
    try:
        if suffix == ".jsonl":
            records = _jsonl(path, file, max_row_bytes)
        elif suffix == ".json":
            records = _json(path, file)
        elif suffix == ".csv":
            records = _csv(path, file, max_row_bytes)
        elif suffix == ".parquet":
            records = _parquet(path, file)
        else:
            records = _text(path, file)
        for number, (line, record) in enumerate(records):
            row = _row(record, file, number, line)
            size = _size(row)
            if size > max_row_bytes:
                raise _too_large(file, line, number, size, max_row_bytes)
            yield row
    except UnicodeDecodeError as error:
        line = None if suffix == ".parquet" else _line_not_utf8(path)
        raise DataError.at(
            file, line, f"not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error


def _jsonl(path: Path, file: str, max_row_bytes: int) -> Iterator[_Record]:
    for line, text in enumerate(_lines(path, file), start=1):
        if not text.strip():
            continue
        # Escapes make a line up to six times as long as its text.
        if len(text) > 6 * max_row_bytes + (1 << 16):
            raise _too_large(file, line, line - 1, len(text), max_row_bytes)
        try:
            record = json.loads(text)
        except ValueError as error:
            raise DataError.at(
                file, line, f"not JSON ({error}); each line must be one JSON object"
            ) from error
        yield line, _object(record, file, line)


def _json(path: Path, file: str) -> Iterator[_Record]:
    text = path.read_text(encoding="utf-8-sig")
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError.at(
            file, error.lineno, f"not JSON ({error.msg}); one object per line belongs in a .jsonl"
        ) from error
    if not isinstance(records, list):
        raise DataError.at(
            file, None, f"holds {_kind(records)}, not a list of objects; make it a list of rows"
        )
    for record in records:
        yield None, _object(record, file, None)


def _object(record: object, file: str, line: int | None) -> Mapping[str, object]:
    if not isinstance(record, dict):
        raise DataError.at(file, line, f"holds {_kind(record)}, not an object with {KNOWN_COLUMNS}")
    return record


def _csv(path: Path, file: str, max_row_bytes: int) -> Iterator[_Record]:
    csv.field_size_limit(6 * max_row_bytes + (1 << 16))
    reader = csv.reader(_lines(path, file), strict=True)
    try:
        header = next(reader, [])
        first = reader.line_num + 1
        for values in reader:
            if len(values) != len(header) and values:
                raise DataError.at(
                    file,
                    first,
                    f"has {len(values)} fields where the header has {len(header)}; quote "
                    "fields that contain commas or line breaks",
                )
            if values:
                yield first, dict(zip(header, values, strict=True))
            first = reader.line_num + 1
    except csv.Error as error:
        raise DataError.at(
            file, reader.line_num, f"not CSV ({error}); see RFC 4180 for the quoting"
        ) from error


def _parquet(path: Path, file: str) -> Iterator[_Record]:
    for batch in _stream("parquet", path, file):
        for record in batch.to_pylist():
            yield None, record


def _text(path: Path, file: str) -> Iterator[_Record]:
    for batch in _stream("text", path, file, encoding="utf-8-sig", sample_by="paragraph"):
        for text in batch["text"].to_pylist():
            if text.strip():
                yield None, {"text": text}


def _lines(path: Path, file: str) -> Iterator[str]:
    """With their ends, which a quoted field of a CSV needs."""
    for batch in _stream("text", path, file, encoding="utf-8-sig", keep_linebreaks=True):
        yield from batch["text"].to_pylist()


def _stream(reader: str, path: Path, file: str, **options: object) -> Iterator["pyarrow.Table"]:
    """Batches of records as `datasets` reads them. Raises DataError, UnicodeDecodeError."""
    import datasets

    if path.stat().st_size == 0:
        return
    try:
        # Not `load_dataset`, which tells the Hub of every call, and waits for its answer.
        read = getattr(datasets.IterableDataset, f"from_{reader}")
        records = read(glob.escape(str(path)), **options)
        yield from records.with_format("arrow").iter(batch_size=1024)
    except UnicodeDecodeError:
        raise
    except Exception as error:
        # pandas, pyarrow and datasets each have a tree of their own for a broken file.
        reason = str(error.__cause__ or error).strip().splitlines()[0]
        raise DataError.at(file, None, f"cannot be read as {reader} ({reason})") from error


def _line_not_utf8(path: Path) -> int | None:
    with path.open("rb") as lines:
        for line, data in enumerate(lines, start=1):
            try:
                data.decode()
            except UnicodeDecodeError:
                return line
    return None


def _row(record: Mapping[str, object], file: str, number: int, line: int | None) -> Row:
    def text(column: str) -> str:
        value = record[column]
        if not isinstance(value, str):
            raise DataError.at(
                file, line, f"{_where(number, line)}`{column}` holds {_kind(value)}, not text"
            )
        return value

    if record.get("messages") is not None:
        return Row(
            messages=_messages(record["messages"], file, number, line), file=file, number=number
        )
    if "prompt" in record and "completion" in record:
        return Row(prompt=text("prompt"), completion=text("completion"), file=file, number=number)
    if "text" in record:
        return Row(text=text("text"), file=file, number=number)
    raise DataError.at(
        file,
        line,
        f"nothing to learn from in the columns {', '.join(map(repr, record)) or '(none)'}; known "
        f"are {KNOWN_COLUMNS}",
    )


def _messages(value: object, file: str, number: int, line: int | None) -> tuple[Message, ...]:
    def wrong(problem: str) -> DataError:
        return DataError.at(
            file,
            line,
            f"{_where(number, line)}`messages` {problem}; it must be a list of objects with "
            f"`role` ({', '.join(ROLES)}) and `content`, one of them the assistant's",
        )

    if not isinstance(value, list):
        raise wrong(f"holds {_kind(value)}")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise wrong(f"has {_kind(message)} in it")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES or not isinstance(content, str):
            raise wrong(f"has role {role!r} with {_kind(content)} as content")
        messages.append((role, content))
    if not any(role == "assistant" for role, _ in messages):
        raise wrong("has no answer to learn")
    return tuple(messages)


def _size(row: Row) -> int:
    texts = [row.text, row.prompt, row.completion, *(content for _, content in row.messages or ())]
    return sum(len(text.encode()) for text in texts if text)


def _too_large(file: str, line: int | None, number: int, size: int, limit: int) -> DataError:
    return DataError.at(
        file,
        line,
        f"{_where(number, line)}a row of {size:,} bytes is above the limit of {limit:,}; split it, "
        "or raise `train.max_row_bytes`",
    )


def _where(number: int, line: int | None) -> str:
    return "" if line is not None else f"row {number + 1}: "


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "text", type(None): "nothing"}
    return names.get(type(value), f"the value {value!r}")
