"""Reads the rows of data files. An error names the file and the line.

Files are read with the standard library. Parquet files and compressed files are read with pyarrow.
The readers of the library `datasets` are not used, because they change values: a date becomes a
timestamp, "007" becomes a number, and missing fields are filled in. The hash of a row would then
not be the hash of what was pushed. They also lose line numbers.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from pipeline.retrain.columns import Columns, kind
from pipeline.retrain.data_files import COMPRESSIONS, suffix_of
from pipeline.retrain.errors import DataError
from pipeline.retrain.rows import Message, Row

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_CHUNK = 1 << 23

_Record = tuple[int | None, Columns | DataError]
"""The line, or None if it is not known; and the columns of the record, or an error if it has
none."""


def _raise(error: DataError) -> NoReturn:
    raise error


def read_file(
    folder: Path,
    file: str,
    max_row_bytes: int,
    rename: Callable[[Columns], Columns],
    on_error: Callable[[DataError], None] = _raise,
) -> Iterator[Row]:
    """The rows of one file.

    rename: turns the columns of a record into the columns of a row, or raises ValueError. on_error:
    is called for each row that cannot be read, and if the rest of the file cannot be read. If it
    raises nothing, these rows are left out.
    """
    try:
        for number, (line, record) in enumerate(_records(folder / file, file, max_row_bytes)):
            try:
                if isinstance(record, DataError):
                    raise record
                yield _row(record, file, number, line, max_row_bytes, rename)
            except DataError as error:
                on_error(error)
    except DataError as error:
        on_error(error)


def _records(path: Path, file: str, max_row_bytes: int) -> Iterator[_Record]:
    suffix = suffix_of(file)
    compression = COMPRESSIONS.get(Path(file).suffix.lower())
    try:
        with _open(path, compression) as data:
            start = data.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise DataError.at(
                file,
                None,
                "a pointer of Git LFS, not the content; push the content itself (`git lfs "
                f"migrate export --include={file!r}`)",
            )
        if suffix == ".parquet":
            yield from _parquet(path)
            return
        with io.TextIOWrapper(_open(path, compression), encoding="utf-8-sig") as text:
            if suffix == ".txt":
                yield from _text(text, file, max_row_bytes)
            elif suffix in (".csv", ".tsv"):
                yield from _csv(text, file, max_row_bytes, suffix)
            elif suffix == ".json":
                yield from _json(text.read(), file, max_row_bytes)
            else:
                yield from _jsonl(text, file, max_row_bytes)
    except UnicodeDecodeError as error:
        line = None if suffix == ".parquet" else _line_not_utf8(path, compression)
        raise DataError.at(
            file, line, f"not UTF-8 text ({error.reason}); save the file as UTF-8"
        ) from error
    except DataError:
        raise
    except Exception as error:
        # For a broken file, pyarrow may raise many kinds of errors, with no common base class.
        if compression is None and suffix != ".parquet":
            raise
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        form = compression or "parquet"
        raise DataError.at(file, None, f"cannot be read as {form} ({reason})") from error


def _open(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _jsonl(lines: Iterable[str], file: str, max_row_bytes: int) -> Iterator[_Record]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        # In JSON, an escape such as \u0041 takes six characters for one. So a line may be six times
        # as long as its text.
        if len(text) > 6 * max_row_bytes + (1 << 16):
            yield line, _too_large(file, line, line - 1, len(text), max_row_bytes)
            continue
        try:
            yield line, _object(json.loads(text.rstrip()), file, line)
        except (ValueError, RecursionError) as error:
            problem = f"not JSON ({_what_is_wrong(error)}); each line must be one JSON object"
            yield line, DataError.at(file, line, problem)


def _what_is_wrong(error: ValueError | RecursionError) -> str:
    """The message of the error without its line number. The parser was given only one line of the
    file, so it would always say line 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos + 1}"
    return str(error)


def _json(text: str, file: str, max_row_bytes: int) -> Iterator[_Record]:
    try:
        records = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" and text.lstrip().startswith("{"):
            # Many .json files hold one object per line, like a .jsonl file.
            yield from _jsonl(io.StringIO(text), file, max_row_bytes)
            return
        raise DataError.at(
            file, error.lineno, f"not JSON ({error.msg}); make it a list of objects"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError.at(file, None, f"not JSON ({error}); make it a list of objects") from error
    if isinstance(records, dict) and "\n" not in text.strip():
        yield from _jsonl(io.StringIO(text), file, max_row_bytes)  # a file of one row
        return
    if not isinstance(records, list):
        raise DataError.at(
            file, None, f"holds {kind(records)}, not a list of objects; make it a list of rows"
        )
    for record in records:
        yield None, _object(record, file, None)


def _object(record: object, file: str, line: int | None) -> Columns | DataError:
    if not isinstance(record, dict):
        return DataError.at(file, line, f"holds {kind(record)}, not an object with columns")
    return record


def _csv(lines: Iterable[str], file: str, max_row_bytes: int, suffix: str) -> Iterator[_Record]:
    csv.field_size_limit(6 * max_row_bytes + (1 << 16))
    reader = csv.reader(lines, strict=True, delimiter="\t" if suffix == ".tsv" else ",")
    first = 1
    try:
        header = next(reader, [])
        first = reader.line_num + 1
        for values in reader:
            if len(values) == len(header):
                yield first, dict(zip(header, values, strict=True))
            elif values:
                fields = "1 field" if len(values) == 1 else f"{len(values)} fields"
                problem = (
                    f"has {fields} where the header has {len(header)}; quote fields "
                    f"that contain {'tabs' if suffix == '.tsv' else 'commas'} or line breaks"
                )
                yield first, DataError.at(file, first, problem)
            first = reader.line_num + 1
    except csv.Error as error:
        # A quotation mark that is never closed is noticed many lines later. So name the line on
        # which the row begins.
        until = f" in the row up to line {reader.line_num}" if reader.line_num > first else ""
        raise DataError.at(
            file, first, f"not {suffix[1:].upper()} ({error}{until}); see RFC 4180 for the quoting"
        ) from error


def _parquet(path: Path) -> Iterator[_Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        for batch in table.iter_batches(batch_size=1024):
            for record in batch.to_pylist():
                yield None, {name: _without_nothing(value) for name, value in record.items()}


def _without_nothing(value: Any) -> Any:
    """Remove the keys without a value from the objects in `value`. In a table, each object has the
    keys of all objects in its column, and None for keys that it does not use."""
    if isinstance(value, list):
        return [_without_nothing(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_nothing(each) for key, each in value.items() if each is not None}
    return value


def _text(data: io.TextIOWrapper, file: str, max_row_bytes: int) -> Iterator[_Record]:
    """One record for each paragraph. An empty line separates two paragraphs."""
    line, rest = 1, ""
    while chunk := data.read(_CHUNK):
        *paragraphs, rest = (rest + chunk).split("\n\n")
        for text in paragraphs:
            yield from _paragraph(text, line)
            line += text.count("\n") + 2
        if len(rest) > max_row_bytes:
            raise _too_large(file, line, 0, len(rest), max_row_bytes)
    yield from _paragraph(rest, line)


def _paragraph(text: str, line: int) -> Iterator[_Record]:
    if text.strip():
        yield line + len(text) - len(text.lstrip("\n")), {"text": text}


def _line_not_utf8(path: Path, compression: str | None) -> int | None:
    with _open(path, compression) as lines:
        for line, data in enumerate(lines, start=1):
            try:
                data.decode()
            except UnicodeDecodeError:
                return line
    return None


def _row(
    record: Columns,
    file: str,
    number: int,
    line: int | None,
    max_row_bytes: int,
    rename: Callable[[Columns], Columns],
) -> Row:
    """Raises DataError."""
    try:
        content = _content(rename(record))
        _check_json(content)
    except ValueError as error:
        raise DataError.at(file, line, f"{_where(number, line)}{error}") from error
    row = Row(**content, file=file, number=number, line=line)
    size = _size(row)
    if size > max_row_bytes:
        raise _too_large(file, line, number, size, max_row_bytes)
    return row


def _content(columns: Columns) -> dict[str, Any]:
    """The fields of a `Row`. Raises ValueError if a column has the wrong type."""
    if "messages" in columns:
        content: dict[str, Any] = {"messages": _messages(columns["messages"])}
        if "tools" in columns:
            content["tools"] = _tools(columns["tools"])
        return content
    for column, value in columns.items():
        if not isinstance(value, str):
            raise ValueError(f"`{column}` holds {kind(value)}, not text")
    return dict(columns)


def _check_json(content: Mapping[str, Any]) -> None:
    """Raises ValueError if the content cannot be hashed: it is hashed as JSON, but parquet has more
    kinds of values, such as dates and bytes. Also raises ValueError if a text holds half of a
    character (a surrogate), which a JSON escape can write. UTF-8 cannot encode it, and no tokenizer
    accepts it."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start]
        raise ValueError(
            f"the escape {half!a} is half of a character; write both halves, or the character"
        ) from error
    except (TypeError, RecursionError) as error:
        columns = ", ".join(f"`{column}`" for column in content)
        raise ValueError(
            f"{columns} cannot be written as JSON ({error}); write each value in it as text"
        ) from error


def _messages(value: object) -> tuple[Message, ...]:
    def wrong(problem: str) -> ValueError:
        return ValueError(
            f"`messages` {problem}; it must be a list of objects with `role` "
            f"({', '.join(ROLES)}) and `content`, one of them the assistant's"
        )

    if not isinstance(value, list):
        raise wrong(f"holds {kind(value)}")
    messages = []
    for message in value:
        if not isinstance(message, dict):
            raise wrong(f"has {kind(message)} in it")
        role, content = message.get("role"), message.get("content")
        # A message that calls tools needs no content. The content may be a list of parts, because
        # some templates support this.
        calls = message.get("tool_calls") or []
        is_said = isinstance(content, str | list) or (content is None and bool(calls))
        if role not in ROLES or not is_said:
            raise wrong(f"has role {role!r} with {kind(content)} as content")
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise wrong(f"has `tool_calls` with {kind(calls)}, not a list of objects")
        given = {key: each for key, each in message.items() if each is not None}
        messages.append({"role": role, "content": "", **given})
    if not any(message["role"] == "assistant" for message in messages):
        raise wrong("has no answer to learn")
    return tuple(messages)


def _tools(value: object) -> tuple[Mapping[str, Any], ...]:
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ValueError(f"`tools` holds {kind(value)}; it must be a list of JSON schemas")
    return tuple(value)


def _size(row: Row) -> int:
    said = [message["content"] for message in row.messages or ()]
    return sum(
        len(text.encode() if isinstance(text, str) else json.dumps(text))
        for text in (row.text, row.prompt, row.completion, *said)
        if text
    )


def _too_large(file: str, line: int | None, number: int, size: int, limit: int) -> DataError:
    return DataError.at(
        file,
        line,
        f"{_where(number, line)}a row of {size:,} bytes is above the limit of {limit:,}; split it, "
        "or raise max_row_bytes under [pipelines.data]",
    )


def _where(number: int, line: int | None) -> str:
    return "" if line is not None else f"row {number + 1}: "
