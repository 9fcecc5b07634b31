"""Turns the operations of a commit that comes over the API into the changes that git stores. In
place of a large file, git stores a pointer: a small file that names the content. The paths of large
files are added to `.gitattributes`."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pipeline.formats import Pointer
from pipeline.hub.commits.body import CommitBody, Operation
from pipeline.hub.contents.attributes import ATTRIBUTES_FILE, large_file_paths, tracking_line
from pipeline.hub.contents.trees import Entry, read_tree
from pipeline.hub.errors import BadRequest, EntryNotFound
from pipeline.hub.git.process import git
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import parents_of
from pipeline.hub.repositories.store import Repository

MAX_GIT_BYTES = 10 * 1024 * 1024
"""A file with more bytes is stored as a large file, even if `.gitattributes` does not list it."""
_MAX_LINE_BYTES = 2048
# `huggingface_hub` looks for these words in the error, and then explains how to delete a folder.
_NOT_THERE = "A file with this name doesn't exist"

Files = Mapping[str, Operation | None]
"""The files after a commit, by their path. None is a file that the commit does not change."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file or folder of a commit. The changes of a commit apply in their order."""

    action: Literal["add", "delete"]
    path: str
    read: Callable[[], bytes] = bytes
    """Returns what git stores for an added file: its content, or the pointer to a large file."""
    is_executable: bool = False
    """A client of the API cannot set this. A changed file stays executable."""


def planned_changes(repository: Repository, head: str | None, body: CommitBody) -> list[Change]:
    """The changes of the commit, with pointers in place of large files. If no `.gitattributes`
    lists a large file, one more change adds its line to the `.gitattributes` in the root.

    Raises EntryNotFound if the commit deletes something that `head` does not have. Raises
    BadRequest if a path would be both a file and a folder, or if a large file was not uploaded.
    """
    tree = read_tree(repository, head)
    after = _files_after(tree, head, body)
    kept = {path: oid for path, oid in attributes_files(tree).items() if path in after}
    attributes = kept | _store_attributes(repository, body, after)
    added = {path: operation for path, operation in after.items() if operation is not None}
    tracked = large_file_paths(repository, attributes, added)

    # Deletions first: `added` has only the files that the commit does not delete again.
    changes = [Change(action="delete", path=each.path) for each in body.operations if each.deletes]
    untracked = []
    files = LargeFiles(repository.folder)
    for path, operation in added.items():
        if operation.kind == "lfsFile" and not files.keep(operation.oid):
            raise BadRequest(
                f"{path!r} is the large file {operation.oid}, which the hub does not have: "
                "upload the file before the commit."
            )
        read = partial(body.content, operation)
        if _becomes_large(operation, tracked):
            read = partial(_render_pointer, files, body, operation)
            if path not in tracked:
                untracked.append(path)
        is_executable = path in tree and tree[path].is_executable
        changes.append(Change(action="add", path=path, read=read, is_executable=is_executable))
    if untracked:
        changes.append(_tracking(repository, attributes.get(ATTRIBUTES_FILE), untracked))
    return changes


def _files_after(tree: Mapping[str, Entry], head: str | None, body: CommitBody) -> Files:
    """Applies the operations, in their order and only in memory, to the `tree` of `head`. Raises
    EntryNotFound and BadRequest, as `planned_changes` does."""
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


def _becomes_large(operation: Operation, tracked: Collection[str]) -> bool:
    if operation.kind == "lfsFile":
        return True
    is_tracked = operation.path in tracked and operation.size_bytes > 0
    return is_tracked or operation.size_bytes > MAX_GIT_BYTES


def _render_pointer(files: LargeFiles, body: CommitBody, operation: Operation) -> bytes:
    if operation.kind == "lfsFile":
        size = files.size(operation.oid)
        assert size is not None
        return Pointer(oid=operation.oid, size=size).render()
    content = body.content(operation)
    if Pointer.parse(content) is not None:
        return content
    oid = files.store([content], None, len(content))
    return Pointer(oid=oid, size=len(content)).render()


def _tracking(repository: Repository, blob: str | None, paths: Iterable[str]) -> Change:
    """The change that adds a line for each path to the `.gitattributes` in the root. Without these
    lines, a clone would have the pointers instead of the files."""
    before = b"" if blob is None else git(repository.folder, "cat-file", "blob", blob)
    if before and not before.endswith(b"\n"):
        before += b"\n"
    content = before + "".join(map(tracking_line, paths)).encode()
    return Change(action="add", path=ATTRIBUTES_FILE, read=lambda: content)


def attributes_files(tree: Mapping[str, Entry]) -> dict[str, str]:
    """Maps the path of each `.gitattributes` to the sha of its blob."""
    return {
        path: entry.oid
        for path, entry in tree.items()
        if path.rpartition("/")[2] == ATTRIBUTES_FILE and entry.type == "file"
    }


def _store_attributes(repository: Repository, body: CommitBody, after: Files) -> dict[str, str]:
    """Stores the content of each added `.gitattributes`, and maps its path to the sha of its blob.
    Raises BadRequest for a line that git would refuse in a push."""
    blobs: dict[str, str] = {}
    for path, operation in after.items():
        if operation and operation.kind == "file" and path.rpartition("/")[2] == ATTRIBUTES_FILE:
            content = body.content(operation)
            if any(len(line) > _MAX_LINE_BYTES for line in content.split(b"\n")):
                raise BadRequest(
                    f"{path!r} has a line of more than {_MAX_LINE_BYTES} bytes, which git "
                    "refuses: shorten it."
                )
            stored = git(repository.folder, "hash-object", "-w", "--stdin", stdin=content)
            blobs[path] = stored.decode().strip()
    return blobs
