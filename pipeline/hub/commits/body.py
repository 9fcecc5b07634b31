"""Reads the body of a commit that comes over the API: lines of JSON. The first line is the header,
and each further line is one operation.

A commit may be larger than the memory. So the body stays in a file, and only one line at a time is
in memory.
"""

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pipeline.formats import OID
from pipeline.hub.errors import BadRequest
from pipeline.hub.repositories.names import changed_path, new_file_path

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_OPERATIONS = 100_000

_NO_NUL = r"^[^\x00]*$"
"""Git refuses a NUL character in a message."""

Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["file", "lfsFile", "deletedFile", "deletedFolder"]


class CommitHeader(BaseModel):
    summary: str = Field(min_length=1, max_length=64 * 1024, pattern=_NO_NUL)
    description: str = Field(default="", max_length=MAX_LINE_BYTES, pattern=_NO_NUL)
    parentCommit: str | None = Field(default=None, pattern=r"^[0-9a-f]{7,40}$")

    @property
    def message(self) -> str:
        return "\n\n".join(part for part in (self.summary, self.description) if part) + "\n"


class _FirstLine(BaseModel):
    key: Literal["header"]
    value: CommitHeader


class _Value(BaseModel):
    """The value of an operation. Each kind has a path. A `file` has the content too, and an
    `lfsFile` the sha256."""

    path: str
    content: str = ""
    encoding: Literal["base64", "utf-8"] = "utf-8"
    oid: str = Field(default="", pattern=f"^({OID.pattern})?$")
    algo: Literal["sha256"] = "sha256"

    def decoded(self) -> bytes:
        try:
            if self.encoding == "utf-8":
                return self.content.encode()
            return base64.b64decode(self.content, validate=True)
        except ValueError as error:
            raise BadRequest(
                f"The content of {self.path!r} is not valid {self.encoding} ({error}): encode it "
                "again, as base64 if it is not text."
            ) from None


class _Line(BaseModel):
    key: Kind
    value: _Value


@dataclass(frozen=True, kw_only=True)
class Operation:
    kind: Kind
    path: str
    size_bytes: int = 0
    """The size of the content of a `file`; 0 for every other kind."""
    oid: str = ""
    """The sha256 of an `lfsFile`; empty for every other kind."""
    offset: int = 0
    """Where the line of this operation begins in the body, in bytes."""

    @property
    def deletes(self) -> bool:
        return self.kind in ("deletedFile", "deletedFolder")


class CommitBody:
    """The parsed body. `file` holds the complete body. Raises BadRequest if the body is not a valid
    commit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        lines = self._lines()
        _, first = next(lines, (0, b""))
        self.header = _read(_FirstLine, first).value
        self.operations = [self._operation(offset, line) for offset, line in lines]

    def content(self, operation: Operation) -> bytes:
        """The content of an operation of the kind `file`, read from the body again."""
        self._file.seek(operation.offset)
        return _read(_Line, self._file.readline()).value.decoded()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = num_lines = 0
        while True:
            self._file.seek(offset)
            line = self._file.readline(MAX_LINE_BYTES + 1)
            if len(line) > MAX_LINE_BYTES:
                raise BadRequest(
                    f"One line of the commit has more than {MAX_LINE_BYTES} bytes: send this file "
                    "as a large file."
                )
            if not line:
                return
            if line.strip():
                num_lines += 1
                if num_lines > MAX_OPERATIONS + 1:
                    raise BadRequest(
                        f"A commit may have {MAX_OPERATIONS} operations at most: send several "
                        "commits."
                    )
                yield offset, line
            offset += len(line)

    def _operation(self, offset: int, line: bytes) -> Operation:
        read = _read(_Line, line)
        kind, found = read.key, read.value
        path = found.path.rstrip("/") if kind == "deletedFolder" else found.path
        checked = new_file_path(path) if kind in ("file", "lfsFile") else changed_path(path)
        if kind == "lfsFile" and not found.oid:
            raise BadRequest(f"The large file {path!r} has no oid: give its sha256.")
        return Operation(
            kind=kind,
            path=checked,
            size_bytes=len(found.decoded()),
            oid=found.oid,
            offset=offset,
        )


def _read(model: type[Model], line: bytes) -> Model:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        # Without the value, which may be a large file.
        wrong = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, wrong["loc"]))
        raise BadRequest(
            f"A line of the commit is wrong: {place or 'the line'}: {wrong['msg']}. Each line must "
            'be JSON with a "key" and a "value", and the key of the first line is "header".'
        ) from None
