"""Makes a commit that comes over the API: reads its body, turns its operations into the changes
that git stores, and hands these to one `git fast-import`. In place of a large file, git stores a
pointer: a small file that names the content. The paths of large files are added to
`.gitattributes`.

The body has lines of JSON: the first line is the header, and each further line is one operation. A
commit may be larger than the memory. So the body stays in a file, and only one line at a time is in
memory. The caller holds the repository's lock. The format that `git fast-import` reads is described
at https://git-scm.com/docs/git-fast-import.
"""

import base64
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import IO, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from pipeline.formats import OID, Pointer
from pipeline.hub.contents import (
    ATTRIBUTES_FILE,
    NEW_REPOSITORY,
    Entry,
    large_file_paths,
    read_commit,
    read_path,
    read_tree,
    tracking_line,
)
from pipeline.hub.errors import BadRequest, EntryNotFound, HubError, PreconditionFailed
from pipeline.hub.git import INCOMING_PREFIX, NO_REF, Signature, clear_repository, git
from pipeline.hub.http_json import reasons
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import (
    RefChange,
    Repository,
    changed_path,
    new_file_path,
    parents_of,
)
from receiver.rules import DEFAULT_BRANCH

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
        first_lines = islice(lines, MAX_OPERATIONS + 1)
        self.operations = [self._operation(offset, line) for offset, line in first_lines]
        if len(self.operations) > MAX_OPERATIONS:
            raise BadRequest(
                f"A commit may have {MAX_OPERATIONS} operations at most: send several commits."
            )

    def content(self, operation: Operation) -> bytes:
        """The content of an operation of the kind `file`, read from the body again. Raises
        BadRequest if it is wrongly encoded."""
        self._file.seek(operation.offset)
        return _read(_Line, self._file.readline()).value.decoded()

    def _lines(self) -> Iterator[tuple[int, bytes]]:
        offset = self._file.seek(0)
        while line := self._file.readline(MAX_LINE_BYTES + 1):
            if len(line) > MAX_LINE_BYTES:
                raise BadRequest(
                    f"One line of the commit has more than {MAX_LINE_BYTES} bytes: send this file "
                    "as a large file."
                )
            if line.strip():
                yield offset, line
            offset += len(line)

    def _operation(self, offset: int, line: bytes) -> Operation:
        read = _read(_Line, line)
        kind, found = read.key, read.value
        path = found.path.rstrip("/") if kind == "deletedFolder" else found.path
        checked = new_file_path(path) if kind in ("file", "lfsFile") else changed_path(path)
        if kind == "lfsFile" and not found.oid:
            raise BadRequest(f"The large file {path!r} has no oid: give its sha256.")
        return Operation(kind=kind, path=checked, oid=found.oid, offset=offset)


def _read(model: type[Model], line: bytes) -> Model:
    try:
        return model.model_validate_json(line)
    except ValidationError as error:
        # Without the value, which may be a large file.
        raise BadRequest(
            f"A line of the commit is wrong: {reasons(error)}. Each line must be JSON with a "
            '"key" and a "value", and the key of the first line is "header".'
        ) from None


MAX_GIT_BYTES = 10 * 1024 * 1024
"""A client sends a file with more bytes as a large file, even if `.gitattributes` does not list
it."""
# `huggingface_hub` looks for these words in the error, and then explains how to delete a folder.
_NOT_THERE = "A file with this name doesn't exist"

Files = Mapping[str, Operation | None]
"""The files after a commit, by their path. None is a file that the commit does not change."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file or folder of a commit. The changes of a commit apply in their order."""

    path: str
    read: Callable[[], bytes] | None
    """Returns what git stores for an added file: its content, or the pointer to a large file. None
    deletes the path."""
    is_executable: bool = False
    """A client of the API cannot set this. A changed file stays executable."""


def build_commit(
    repository: Repository, head: str | None, body: CommitBody, author: Signature
) -> str:
    """Makes the commit on top of `head`, with pointers in place of large files, and returns its
    sha. No ref leads to it yet. If no `.gitattributes` lists a large file, the commit also adds its
    line to the `.gitattributes` in the root.

    Raises EntryNotFound if the commit deletes something that `head` does not have. Raises
    BadRequest if a path would be both a file and a folder, or if a large file was not uploaded.
    Raises DiskFull.
    """
    tree = read_tree(repository, head)
    after = _files_after(tree, head, body)
    files = LargeFiles(repository.folder)
    # Deletions first: `after` has only the files that the commit does not delete again.
    changes = [Change(path=each.path, read=None) for each in body.operations if each.deletes]
    large = []
    for path, operation in after.items():
        if operation is None:
            continue
        read: Callable[[], bytes] = partial(body.content, operation)
        if operation.kind == "lfsFile":
            size = files.size(operation.oid) if files.keep(operation.oid) else None
            if size is None:
                raise BadRequest(
                    f"{path!r} is the large file {operation.oid}, which the hub does not have: "
                    "upload the file before the commit."
                )
            read = Pointer(oid=operation.oid, size=size).render
            large.append(path)
        is_executable = path in tree and tree[path].is_executable
        changes.append(Change(path=path, read=read, is_executable=is_executable))
    message = body.header.message
    commit = import_commit(repository, head, message, author, changes)
    tracked = large_file_paths(repository, commit, large) if large else set()
    if untracked := [path for path in large if path not in tracked]:
        # Without these lines, a clone would have the pointers instead of the files.
        before = read_path(repository, commit, ATTRIBUTES_FILE)
        if before and not before.endswith(b"\n"):
            before += b"\n"
        content = before + "".join(map(tracking_line, untracked)).encode()
        changes.append(Change(path=ATTRIBUTES_FILE, read=lambda: content))
        commit = import_commit(repository, head, message, author, changes)
    return commit


def _files_after(tree: Mapping[str, Entry], head: str | None, body: CommitBody) -> Files:
    """Applies the operations, in their order and only in memory, to the `tree` of `head`. Raises
    EntryNotFound and BadRequest, as `build_commit` does."""
    after: dict[str, Operation | None] = {
        path: None for path, entry in tree.items() if entry.type == "file"
    }
    for operation in body.operations:
        path = operation.path
        if not operation.deletes:
            after[path] = operation
            continue
        if operation.kind == "deletedFile":
            doomed = [path] if path in after else []
        else:
            doomed = [each for each in after if each.startswith(f"{path}/")]
        if not doomed or (operation.kind != "deletedFile" and path in after):
            raise EntryNotFound(f"{_NOT_THERE}: {path}", commit=head or "")
        for each in doomed:
            del after[each]
    for path in after:
        for folder in parents_of(path):
            if folder in after:
                raise BadRequest(
                    f"{folder!r} is a file, and {path!r} can only be there if it is a folder: "
                    "delete one of the two in the same commit, or choose another path."
                )
    return after


def make_commit(
    repository: Repository, ref: str, head: str | None, body: CommitBody, author: Signature
) -> str:
    """Makes the commit on top of `head`, moves `ref` to it, and returns its sha. If the files stay
    as they are in `head`, this makes no commit and returns `head`.

    Raises PreconditionFailed if the client based the changes on another commit than `head`. Raises
    the errors of `build_commit`.
    """
    parent = body.header.parentCommit
    if parent is not None and not (head or "").startswith(parent):
        raise PreconditionFailed(
            "The branch was updated since you opened this page. Please refresh and try again: "
            f"{ref} is at {head or 'no commit yet'}, and the commit was made for {parent}."
        )
    commit = build_commit(repository, head, body, author)
    if head and read_commit(repository, commit).tree == read_commit(repository, head).tree:
        return head
    git(repository.folder, "update-ref", ref, commit, head or NO_REF)
    return commit


def first_commit(repository: Repository, author: Signature) -> RefChange:
    """Makes the first commit of a new repository, which has only a `.gitattributes`. Every new
    repository on the Hugging Face Hub begins with such a commit."""
    attributes = Change(path=ATTRIBUTES_FILE, read=NEW_REPOSITORY.encode)
    sha = import_commit(repository, None, "initial commit\n", author, [attributes])
    git(repository.folder, "update-ref", DEFAULT_BRANCH, sha, NO_REF)
    return RefChange(ref=DEFAULT_BRANCH, old_sha=None, new_sha=sha)


def import_commit(
    repository: Repository,
    parent: str | None,
    message: str,
    author: Signature,
    changes: Iterable[Change],
) -> str:
    """Makes a commit, and returns its sha. No ref leads to it, so the next garbage collection
    removes it if the caller adds none. Raises DiskFull."""
    incoming = f"{INCOMING_PREFIX}{secrets.token_hex(8)}"
    try:
        _run_fast_import(repository, _stream(incoming, parent, message, author, changes))
        return git(repository.folder, "rev-parse", "--verify", incoming).decode().strip()
    finally:
        # Ask git only if the ref exists: on a full disk, git fails even if there is no such ref.
        if (repository.folder / incoming).exists():
            git(repository.folder, "update-ref", "-d", incoming)


def _stream(
    ref: str, parent: str | None, message: str, author: Signature, changes: Iterable[Change]
) -> Iterator[bytes]:
    who = f"{author.name} <{author.email}> {int(time.time())} +0000"
    text = message.encode()
    yield f"commit {ref}\nauthor {who}\ncommitter {who}\ndata {len(text)}\n".encode()
    yield text
    yield b"\n"
    if parent is not None:
        yield f"from {parent}\n".encode()
    for change in changes:
        path = _quoted(change.path)
        if change.read is not None:
            content = change.read()
            mode = b"100755" if change.is_executable else b"100644"
            yield b"M %s inline %s\ndata %d\n" % (mode, path, len(content))
            yield content
            yield b"\n"
        else:
            yield b"D %s\n" % path
    yield b"done\n"


def _quoted(path: str) -> bytes:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.encode()


def _run_fast_import(repository: Repository, stream: Iterable[bytes]) -> None:
    # First into a file, so that git gets nothing if the stream breaks off.
    with tempfile.TemporaryFile(dir=repository.folder) as file:
        for piece in stream:
            file.write(piece)
        file.seek(0)
        try:
            git(repository.folder, "fast-import", "--quiet", "--done", stdin=file)
        except HubError:
            # Git leaves a report, and an incomplete pack if the disk is full. No other process is
            # writing a pack now, because the caller holds the repository's lock.
            clear_repository(repository.folder)
            raise
