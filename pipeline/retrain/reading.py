"""Reads the rows of data files, and golden questions. An error names the file and the line.

Files are read with the standard library. Parquet files and compressed files are read with pyarrow.
The readers of the library `datasets` are not used, because they change values: a date becomes a
timestamp, "007" becomes a number, and missing fields are filled in. The hash of a row would then
not be the hash of what was pushed. They also lose line numbers.
"""

import csv
import io
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from pipeline.retrain.columns import Columns, RowColumns, is_learned_turn, kind, twice
from pipeline.retrain.errors import DataError, fail
from pipeline.retrain.rows import Row, place
from serving.chat_template import normalise

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_SEPARATORS = {".csv": ",;\t|", ".tsv": "\t,;|"}
"""What may separate the fields, the usual one first."""
_NOT_AS_TEXT = ("TIMESTAMP", "DATE", "TIME")
"""Logical types of parquet whose values cannot always be converted: a time zone may be unknown, and
a date may be after the year 9999."""

_Record = tuple[int | None, int, Columns | str]
"""The first line, or None if it is not known; the number of lines; and the columns of the record,
or what is wrong with it."""


class Unreadable(Exception):
    """The rest of the file cannot be read."""

    def __init__(self, problem: str, line: int | None = None) -> None:
        super().__init__(problem)
        self.line = line


def read_file(
    folder: Path,
    file: str,
    rename: Callable[[Columns], Columns],
    on_error: Callable[[DataError], None] = fail,
    reads: Callable[[str], bool] = lambda _: True,
) -> Iterator[Row]:
    """The rows of one file.

    rename: turns the columns of a record into the columns of a row, or raises ValueError. reads:
    whether `rename` may use the column with this name; others of a table are not read. on_error:
    is called for each row that cannot be read, and if the rest of the file cannot be read. If it
    raises nothing, these rows are left out.
    """
    try:
        for number, (line, _, record) in enumerate(records(folder, file, reads)):
            try:
                if isinstance(record, str):
                    raise ValueError(record)
                row = row_of(record, rename, file=file, number=number, line=line)
            except ValueError as error:
                on_error(DataError(str(error), place(file, number, line)))
            else:
                yield row
    except Unreadable as error:
        on_error(DataError.at(file, error.line, str(error)))


def row_of(record: Columns, rename: Callable[[Columns], Columns], **place: Any) -> Row:
    """The row that these columns say. place: the fields of `Row` that say where it is. Raises
    ValueError."""
    content = _content(rename(record))
    _check_json(content)
    row = Row(**content, **place)
    if row.paraphrases and row.last_question is None:
        raise ValueError("`paraphrases` stand beside no question that is text")
    return row


def suffix_of(path: str) -> str:
    """The suffix in lower case, without that of a compression: `.jsonl` for `a.jsonl.gz`."""
    name = path.rpartition("/")[2].lower()
    for compression in COMPRESSIONS:
        name = name.removesuffix(compression)
    _, dot, suffix = name.rpartition(".")
    return dot + suffix if dot else ""


def records(
    folder: Path, file: str, reads: Callable[[str], bool] = lambda _: True
) -> Iterator[_Record]:
    """The records of one file as they stand there, each with its line. Raises Unreadable."""
    path = folder / file
    suffix = suffix_of(file)
    compression = COMPRESSIONS.get(Path(file).suffix.lower())
    try:
        with _open(path, compression) as data:
            start = data.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise Unreadable(
                "a pointer of Git LFS, not the content; push the content itself (`git lfs "
                f"migrate export --include={file!r}`)"
            )
        if suffix == ".parquet":
            yield from _parquet(path, reads)
            return
        with io.TextIOWrapper(_open(path, compression), encoding="utf-8-sig") as text:
            if suffix == ".txt":
                yield from _text(text.read())
            elif suffix in (".csv", ".tsv"):
                yield from _csv(text, suffix)
            elif suffix == ".json":
                yield from _json(text.read())
            else:
                yield from _jsonl(text)
    except UnicodeDecodeError as error:
        near = bytes(error.object[max(0, error.start - 20) : error.end + 1])
        raise Unreadable(
            f"not UTF-8 text ({error.reason} in {near!r}); save the file as UTF-8"
        ) from error
    except Unreadable:
        raise
    except Exception as error:
        # For a broken file, pyarrow may raise many kinds of errors, with no common base class.
        if compression is None and suffix != ".parquet":
            raise
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        form = compression or "parquet"
        raise Unreadable(f"cannot be read as {form} ({reason})") from error


def _open(path: Path, compression: str | None) -> BinaryIO:
    if compression is None:
        return path.open("rb")
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path), compression=compression))


def _jsonl(lines: Iterable[str]) -> Iterator[_Record]:
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            yield line, 1, _object(_loads(text.rstrip()))
        except (ValueError, RecursionError) as error:
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):
                # The parser was given only one line of the file, so it would always say line 1.
                reason = f"{error.msg} at character {error.pos + 1}"
            yield line, 1, f"not JSON ({reason}); each line must be one JSON object"


def _json(text: str) -> Iterator[_Record]:
    if not text.lstrip().startswith("["):
        # Many .json files hold one object per line, like a .jsonl file.
        yield from _jsonl(io.StringIO(text))
        return
    try:
        records = _loads(text)
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not JSON ({error}); make it a list of objects") from error
    for record in records:
        yield None, 1, _object(record)


def _loads(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_with_each_key_once)


def _with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        raise ValueError(twice(key for key, _ in pairs) or "a key stands twice")
    return record


def _object(record: object) -> Columns | str:
    if isinstance(record, dict):
        return record
    return f"holds {kind(record)}, not an object with columns"


def _csv(lines: Iterator[str], suffix: str) -> Iterator[_Record]:
    reader = csv_reader(lines, suffix)
    separator, first = reader.dialect.delimiter, 1
    try:
        header: list[str] = next(reader, [])
        if problem := twice(header):
            raise Unreadable(problem, 1)
        first = reader.line_num + 1
        for values in reader:
            at = first, reader.line_num - first + 1
            # A row without a value is no row: spreadsheets write such rows after the last one.
            if not any(map(str.strip, values)):
                pass
            elif len(values) == len(header):
                yield *at, dict(zip(header, values, strict=True))
            else:
                fields = "1 field" if len(values) == 1 else f"{len(values)} fields"
                yield (
                    *at,
                    f"has {fields} where the header has {len(header)}; quote fields that contain "
                    f"{separator!r} or line breaks",
                )
            first = reader.line_num + 1
    except csv.Error as error:
        # A quotation mark that is never closed is noticed many lines later. So name the line on
        # which the row begins.
        until = f" in the row up to line {reader.line_num}" if reader.line_num > first else ""
        raise Unreadable(
            f"not {suffix[1:].upper()} with {separator!r} between the fields ({error}{until}); see "
            "RFC 4180 for the quoting",
            first,
        ) from error


def csv_reader(lines: Iterator[str], suffix: str) -> Any:
    """Reads the fields of a CSV file, the header first. Its `dialect` knows what separates them."""
    csv.field_size_limit(sys.maxsize)
    start = next(lines, "").removeprefix("\ufeff")
    separator = max(_SEPARATORS[suffix], key=lambda each: _num_fields(start, each))
    return csv.reader(chain([start], lines), strict=True, delimiter=separator)


def _num_fields(header: str, separator: str) -> int:
    return len(next(csv.reader([header], delimiter=separator), ()))


def _parquet(path: Path, reads: Callable[[str], bool]) -> Iterator[_Record]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as table:
        names = table.schema_arrow.names
        if problem := twice(names):
            raise Unreadable(problem)
        wanted = [
            leaf.path
            for leaf in map(table.schema.column, range(len(table.schema)))
            if reads(leaf.path.split(".")[0]) and _is_readable(leaf)
        ]
        for batch in table.iter_batches(batch_size=1024, columns=wanted):
            for record in batch.to_pylist():
                yield None, 1, record or dict.fromkeys(names)


def _is_readable(leaf: Any) -> bool:
    """Whether the values of a column, or of a part of it, can always be converted. A part that
    cannot is not needed: what is learned is text."""
    is_part = "." in leaf.path
    return not is_part or (
        leaf.logical_type.type not in _NOT_AS_TEXT and leaf.physical_type != "INT96"
    )


def _text(text: str) -> Iterator[_Record]:
    """One record for each paragraph. An empty line separates two paragraphs."""
    line = 1
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            begin = line + len(paragraph) - len(paragraph.lstrip("\n"))
            yield begin, paragraph.strip("\n").count("\n") + 1, {"text": paragraph}
        line += paragraph.count("\n") + 2


def _content(columns: Columns) -> dict[str, Any]:
    """The fields of a `Row`. Raises ValueError if a column has the wrong type."""
    texts = dict(columns)
    is_learned = texts.pop("is_learned", True)
    paraphrases = {"paraphrases": texts.pop("paraphrases", ())}
    if "messages" in columns:
        tools = columns.get("tools")
        talk = _conversation(columns["messages"], tools, is_learned=bool(is_learned))
        return {**talk, **paraphrases}
    for column, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"`{column}` holds {kind(value)}, not text")
    return {**texts, **paraphrases} if is_learned else {**texts, **paraphrases, "masked": (0,)}


def _check_json(content: Mapping[str, Any]) -> None:
    """Raises ValueError if the content cannot be hashed: it is hashed as JSON, but parquet has more
    kinds of values, such as dates and bytes. Also if a text holds half of a character (a
    surrogate), which a JSON escape can write: UTF-8 cannot encode it, and no tokenizer accepts
    it."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(f"cannot be written as JSON ({error}); write each value as text") from None


def _conversation(value: object, tools: object, *, is_learned: bool) -> dict[str, Any]:
    def wrong(problem: str) -> ValueError:
        return ValueError(
            f"`messages` {problem}; it must be a list of objects with `role` "
            f"({', '.join(ROLES)}) and `content`, one of them the assistant's"
        )

    if not isinstance(value, list):
        raise wrong(f"holds {kind(value)}")
    if others := [each for each in value if not isinstance(each, dict)]:
        raise wrong(f"has {kind(others[0])} in it")
    talk = normalise(value, tools)
    masked = []
    for number, (message, said) in enumerate(zip(talk.messages, value, strict=True)):
        is_empty = not any(message.get(key) for key in message if key not in ("role", "name"))
        if message["role"] not in ROLES or (is_empty and said.get("content") is None):
            raise wrong(f"has role {said['role']!r} with {kind(said.get('content'))} as content")
        if message["role"] == "assistant" and not (is_learned and is_learned_turn(said)):
            masked.append(number)
    if not any(message["role"] == "assistant" for message in talk.messages):
        raise wrong("has no answer to learn")
    return {"messages": talk.messages, "tools": talk.tools or None, "masked": tuple(masked)}


def load_golden_questions(path: Path) -> tuple[Row, ...]:
    """Read the golden questions in the file `path`: rows with questions that every release must
    answer correctly, whatever was pushed. Raises DataError.

    The same rule as for rows of the dataset decides whether the model gives the answer
    (`loss.is_said`).
    """
    if not path.is_file():
        raise DataError.at(path, None, "there is no such file; write questions and their answers")
    questions = tuple(read_file(Path(), str(path), RowColumns({})))
    if not questions:
        raise DataError.at(path, None, "holds no golden question; write questions and answers")
    for row in questions:
        if row.answer is None:
            raise DataError("a golden question is a row with a question and an answer", row.place)
    return questions
