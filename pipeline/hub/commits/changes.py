"""Turns the operations of a commit that comes over the API into the changes that git stores. In
place of a large file, git stores a pointer: a small file that names the content. The paths of large
files are added to `.gitattributes`."""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

from pipeline.hub.commits.body import CommitBody, Operation
from pipeline.hub.commits.checks import Change
from pipeline.hub.contents.attributes import ATTRIBUTES_FILE, large_file_paths, tracking_line
from pipeline.hub.contents.trees import Entry, read_tree
from pipeline.hub.errors import BadRequest
from pipeline.hub.git.process import git
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import parents_of
from pipeline.hub.repositories.store import Repository
from pipeline.pointers import Pointer

MAX_GIT_BYTES = 10 * 1024 * 1024
"""A file with more bytes is stored as a large file, even if `.gitattributes` does not list it."""
_MAX_LINE_BYTES = 2048


def planned_changes(repository: Repository, head: str | None, body: CommitBody) -> list[Change]:
    """The changes of the commit, with pointers in place of large files. If no `.gitattributes`
    lists a large file, one more change adds its line to the `.gitattributes` in the root. Raises
    BadRequest if a large file was not uploaded."""
    files = LargeFiles(repository.folder)
    added = [each for each in body.operations if each.kind in ("file", "lfsFile")]
    paths = [each.path for each in added]
    tree = read_tree(repository, head)
    deleted = {each.path for each in body.operations} - set(paths)
    attributes = {
        path: oid
        for path, oid in attributes_files(tree).items()
        if deleted.isdisjoint([path, *parents_of(path)])
    } | _store_attributes(repository, body, added)
    tracked = large_file_paths(repository, attributes, paths)

    changes, untracked = [], []
    for operation in body.operations:
        path = operation.path
        if operation.kind == "deletedFile":
            changes.append(Change(action="delete file", path=path))
        elif operation.kind == "deletedFolder":
            changes.append(Change(action="delete folder", path=path))
        else:
            is_large = _becomes_large(operation, tracked)
            if is_large and path not in tracked:
                untracked.append(path)
            read = (
                partial(_render_pointer, files, body, operation)
                if is_large
                else partial(body.content, operation)
            )
            present = tree.get(path)
            is_executable = present is not None and present.is_executable
            changes.append(Change(action="add", path=path, read=read, is_executable=is_executable))
            if operation.kind == "lfsFile" and not files.keep(operation.oid):
                raise BadRequest(
                    f"{path!r} is the large file {operation.oid}, which the hub does not have: "
                    "upload the file before the commit."
                )
    if untracked:
        changes.append(_tracking(repository, attributes.get(ATTRIBUTES_FILE), untracked))
    return changes


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


def _store_attributes(
    repository: Repository, body: CommitBody, added: Iterable[Operation]
) -> dict[str, str]:
    """Stores the content of each added `.gitattributes`, and maps its path to the sha of its blob.
    Raises BadRequest for a line that git would refuse in a push."""
    blobs: dict[str, str] = {}
    for each in added:
        if each.path.rpartition("/")[2] == ATTRIBUTES_FILE and each.kind == "file":
            content = body.content(each)
            if any(len(line) > _MAX_LINE_BYTES for line in content.split(b"\n")):
                raise BadRequest(
                    f"{each.path!r} has a line of more than {_MAX_LINE_BYTES} bytes, which git "
                    "refuses: shorten it."
                )
            stored = git(repository.folder, "hash-object", "-w", "--stdin", stdin=content)
            blobs[each.path] = stored.decode().strip()
    return blobs
