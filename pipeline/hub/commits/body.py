"""Reads the body of a commit that comes over the API: lines of JSON. The first line is the header,
and each further line is one operation.

A commit may be larger than the memory. So the body stays in a file, and only one line at a time is
in memory.
"""

import base64
import binascii
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import reasons
from pipeline.hub.repositories.names import changed_path, new_file_path
from pipeline.pointers import OID

MAX_LINE_BYTES = 64 * 1024 * 1024
MAX_OPERATIONS = 100_000

_PARENT = re.compile(r"[0-9a-f]{7,40}")

Model = TypeVar("Model", bound=BaseModel)
Kind = Literal["file", "lfsFile", "deletedFile", "deletedFolder"]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class CommitHeader(_Line):
    summary: str = Field(min_length=1, max_length=64 * 1024)
    description: str = Field(default="", max_length=MAX_LINE_BYTES)
    parentCommit: str | None = None

    @field_validator("summary", "description")
    @classmethod
    def _has_no_nul(cls, value: str) -> str:
        if "\0" in value:
            raise ValueError("it has a NUL character, which git refuses in a message: remove it")
        return value

    @field_validator("parentCommit")
    @classmethod
    def _is_sha(cls, value: str | None) -> str | None:
        if value is not None and not _PARENT.fullmatch(value):
            raise ValueError(f"{value!r} is no sha: give 7 to 40 hexadecimal digits in lower case")
        return value

    @property
    def message(self) -> str:
        return "\n\n".join(part for part in (self.summary, self.description) if part) + "\n"


class _File(_Line):
    path: str
    content: str
    encoding: Literal["base64", "utf-8"] = "utf-8"

    def decoded(self) -> bytes:
        if self.encoding == "utf-8":
            try:
                return self.content.encode()
            except UnicodeEncodeError as error:
                raise BadRequest(
                    f"The content of {self.path!r} is not valid text ({error}): send it as base64."
                ) from None
        try:
            return base64.b64decode(self.content, validate=True)
        except binascii.Error as error:
            raise BadRequest(
                f"The content of {self.path!r} is not valid base64 ({error}): encode it again."
            ) from None


class _LargeFile(_Line):
    path: str
    oid: str = Field(pattern=f"^{OID.pattern}$")
    algo: Literal["sha256"] = "sha256"


class _Deleted(_Line):
    path: str


_MODELS: dict[str, type[_File] | type[_LargeFile] | type[_Deleted]] = {
    "file": _File,
    "lfsFile": _LargeFile,
    "deletedFile": _Deleted,
    "deletedFolder": _Deleted,
}


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


class CommitBody:
    """The parsed body. `file` holds the complete body. Raises BadRequest if the body is not a valid
    commit."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        lines = self._lines()
        first = next(lines, None)
        key, value = ("", None) if first is None else _key_and_value(first[1])
        if key != "header":
            raise BadRequest(
                'The first line of a commit must be its header: JSON with the "key" "header".'
            )
        self.header = _validated(CommitHeader, value)
        self.operations = [self._operation(offset, line) for offset, line in lines]

    def content(self, operation: Operation) -> bytes:
        """The content of an operation of the kind `file`, read from the body again."""
        self._file.seek(operation.offset)
        _, value = _key_and_value(self._file.readline())
        return _validated(_File, value).decoded()

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
        key, value = _key_and_value(line)
        model = _MODELS.get(key)
        if model is None:
            raise BadRequest(
                f"The commit has an unknown operation {key!r}: use {', '.join(_MODELS)}."
            )
        found = _validated(model, value)
        path = found.path.rstrip("/") if key == "deletedFolder" else found.path
        checked = changed_path(path) if isinstance(found, _Deleted) else new_file_path(path)
        return Operation(
            kind=key,  # type: ignore[arg-type]
            path=checked,
            size_bytes=len(found.decoded()) if isinstance(found, _File) else 0,
            oid=found.oid if isinstance(found, _LargeFile) else "",
            offset=offset,
        )


def _key_and_value(line: bytes) -> tuple[str, object]:
    try:
        document = json.loads(line)
        return str(document["key"]), document["value"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise BadRequest('Each line of a commit must be JSON with a "key" and a "value".') from None


def _validated(model: type[Model], value: object) -> Model:
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise BadRequest(f"A line of the commit is wrong: {reasons(error)}.") from None
