"""Makes a commit that comes over the API: reads its body, turns its operations into the changes
that git stores, and hands these to one `git fast-import`. In place of a large file, git stores a
pointer: a small file that names the content. The paths of large files are added to
`.gitattributes`.

The body has lines of JSON: the first line is the header, and each further line is one change. A
commit may be larger than the memory. So the body stays in a file, and only one line at a time is in
memory. The caller holds the repository's lock. The format that `git fast-import` reads is described
at https://git-scm.com/docs/git-fast-import.
"""

import secrets
import tempfile
import time
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import IO, Annotated, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from jobs.spec import DEFAULT_BRANCH
from pipeline.formats import OID, Pointer
from pipeline.hub.contents import (
    ATTRIBUTES_FILE,
    NEW_REPOSITORY,
    Entry,
    have_equal_files,
    large_file_paths,
    look_up,
    read_path,
    read_tree,
    tracking_line,
)
from pipeline.hub.errors import BadRequest, EntryNotFound, HubError, PreconditionFailed
from pipeline.hub.git import INCOMING_PREFIX, NO_REF, Signature, clear_repository, git
from pipeline.hub.http_json import reasons
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.repositories import RefChange, Repository, changed_path, new_file_path, parents_of

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
    content: Annotated[bytes, BeforeValidator(partial(b64decode, validate=True))] = b""
    encoding: Literal["base64"] = "base64"
    oid: str = Field(default="", pattern=f"^({OID.pattern})?$")
    algo: Literal["sha256"] = "sha256"


class _Line(BaseModel):
    key: Kind
    value: _Value


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file or folder of a commit. The changes of a commit apply in their order."""

    path: str
    kind: Kind = "file"
    read: Callable[[], bytes] = bytes
    """Returns what git stores for an added file: its content, or the pointer to a large file."""
    oid: str = ""
    """The sha256 of an `lfsFile`; empty for every other kind."""
    is_executable: bool = False
    """A client of the API cannot set this. A changed file stays executable."""

    @property
    def deletes(self) -> bool:
        return self.kind in ("deletedFile", "deletedFolder")


@dataclass(frozen=True, kw_only=True)
class Commit:
    """What a client wants to commit."""

    header: CommitHeader
    changes: Sequence[Change]


Build = Callable[[Repository, str | None, Commit, Signature], str]


def parse_commit(body: IO[bytes]) -> Commit:
    """The commit in the complete body, from which the contents are read later. Raises BadRequest
    if the body is not a valid commit."""
    lines = _lines(body)
    header = _read(_FirstLine, next(lines, (0, b""))[1]).value
    changes = [_change(body, *each) for each in islice(lines, MAX_OPERATIONS + 1)]
    if len(changes) > MAX_OPERATIONS:
        raise BadRequest(
            f"A commit may have {MAX_OPERATIONS} operations at most: send several commits."
        )
    return Commit(header=header, changes=changes)


def _lines(body: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    """Each line, and where it begins in the body."""
    offset = body.seek(0)
    while line := body.readline(MAX_LINE_BYTES + 1):
        if len(line) > MAX_LINE_BYTES:
            raise BadRequest(
                f"One line of the commit has more than {MAX_LINE_BYTES} bytes: send this file "
                "as a large file."
            )
        if line.strip():
            yield offset, line
        offset += len(line)


def _change(body: IO[bytes], offset: int, line: bytes) -> Change:
    read = _read(_Line, line)
    kind, found = read.key, read.value
    path = found.path.rstrip("/") if kind == "deletedFolder" else found.path
    checked = new_file_path(path) if kind in ("file", "lfsFile") else changed_path(path)
    if kind == "lfsFile" and not found.oid:
        raise BadRequest(f"The large file {path!r} has no oid: give its sha256.")
    return Change(path=checked, kind=kind, oid=found.oid, read=partial(_content, body, offset))


def _content(body: IO[bytes], offset: int) -> bytes:
    body.seek(offset)
    return _read(_Line, body.readline()).value.content


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

Files = Mapping[str, Change | None]
"""The files after a commit, by their path. None is a file that the commit does not change."""


def build_commit(
    repository: Repository, head: str | None, wanted: Commit, author: Signature
) -> str:
    """Makes the commit on top of `head`, with pointers in place of large files, and returns its
    sha. No ref leads to it yet. If no `.gitattributes` lists a large file, the commit also adds its
    line to the `.gitattributes` in the root.

    Raises EntryNotFound if the commit deletes something that `head` does not have. Raises
    BadRequest if a path would be both a file and a folder, or if a large file was not uploaded.
    Raises DiskFull.
    """
    tree = read_tree(repository, head)
    after = _files_after(tree, head, wanted.changes)
    files = LargeFiles(repository.folder)
    # Deletions first: `after` has only the files that the commit does not delete again.
    changes = [each for each in wanted.changes if each.deletes]
    large = []
    for path, change in after.items():
        if change is None:
            continue
        if change.kind == "lfsFile":
            size = files.size(change.oid) if files.keep(change.oid) else None
            if size is None:
                raise BadRequest(
                    f"{path!r} is the large file {change.oid}, which the hub does not have: "
                    "upload the file before the commit."
                )
            change = replace(change, read=Pointer(oid=change.oid, size=size).render)
            large.append(path)
        is_executable = path in tree and tree[path].is_executable
        changes.append(replace(change, is_executable=is_executable))
    message = wanted.header.message
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


def _files_after(tree: Mapping[str, Entry], head: str | None, changes: Sequence[Change]) -> Files:
    """Applies the changes, in their order and only in memory, to the `tree` of `head`. Raises
    EntryNotFound and BadRequest, as `build_commit` does."""
    after: dict[str, Change | None] = {
        path: None for path, entry in tree.items() if entry.type == "file"
    }
    for change in changes:
        path = change.path
        if not change.deletes:
            after[path] = change
            continue
        if change.kind == "deletedFile":
            doomed = [path] if path in after else []
        else:
            doomed = [each for each in after if each.startswith(f"{path}/")]
        if not doomed or (change.kind != "deletedFile" and path in after):
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


def build_undo(repository: Repository, head: str | None, wanted: Commit, author: Signature) -> str:
    """As `build_commit`, but the files are those of the commit before `head`. That commit is the
    second parent, so that git still finds who wrote the lines that come back. Raises BadRequest if
    there is none."""
    before = None if head is None else look_up(repository, [f"{head}^"])[0]
    if head is None or before is None:
        raise BadRequest("There is no commit before this one: delete its rows instead.")
    return commit_tree(repository, before[0], (head, before[0]), wanted.header.message, author)


def commit_tree(
    repository: Repository, tree: str, parents: Iterable[str], message: str, author: Signature
) -> str:
    """Makes a commit with the files of `tree`, and returns its sha. No ref leads to it."""
    above = (option for parent in parents for option in ("-p", parent))
    options = (f"{tree}^{{tree}}", *above, "-F", "-")
    made = git(
        repository.folder,
        "commit-tree",
        *options,
        stdin=message.encode(),
        extra=author.environment,
    )
    return made.decode().strip()


def make_commit(
    repository: Repository,
    ref: str,
    head: str | None,
    wanted: Commit,
    author: Signature,
    build: Build = build_commit,
) -> str:
    """Makes the commit on top of `head`, moves `ref` to it, and returns its sha. If the files stay
    as they are in `head`, this makes no commit and returns `head`.

    Raises PreconditionFailed if the client based the changes on another commit than `head`. Raises
    the errors of `build`.
    """
    parent = wanted.header.parentCommit
    if parent is not None and not (head or "").startswith(parent):
        raise PreconditionFailed(
            "The branch was updated since you opened this page. Please refresh and try again: "
            f"{ref} is at {head or 'no commit yet'}, and the commit was made for {parent}."
        )
    commit = build(repository, head, wanted, author)
    if head and have_equal_files(repository, commit, head):
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
        if change.deletes:
            yield b"D %s\n" % path
            continue
        content = change.read()
        mode = b"100755" if change.is_executable else b"100644"
        yield b"M %s inline %s\ndata %d\n" % (mode, path, len(content))
        yield content
        yield b"\n"
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
