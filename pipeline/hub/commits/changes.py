"""Turns the operations of a commit that comes over the API into the changes that git stores. In
place of a large file, git stores a pointer: a small file that names the content. The paths of large
files are added to `.gitattributes`."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import partial

from pipeline.hub.commits.body import CommitBody, Operation
from pipeline.hub.commits.checks import Change, blob_sha
from pipeline.hub.commits.fast_import import run_fast_import
from pipeline.hub.contents.attributes import ATTRIBUTES_FILE, large_file_paths, tracking_line
from pipeline.hub.contents.trees import Folders, read_folders
from pipeline.hub.errors import BadRequest
from pipeline.hub.git.process import git
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import folders_of, parents_of
from pipeline.hub.repositories.store import Repository
from pipeline.pointers import Pointer

MAX_GIT_BYTES = 10 * 1024 * 1024
"""A file with more bytes is stored as a large file, even if `.gitattributes` does not list it."""


def planned_changes(repository: Repository, head: str | None, body: CommitBody) -> list[Change]:
    """The changes of the commit, with pointers in place of large files. If no `.gitattributes`
    lists a large file, one more change adds its line to the `.gitattributes` in the root. Raises
    BadRequest if a large file was not uploaded."""
    files = LargeFiles(repository.folder)
    added = [each for each in body.operations if each.kind in ("file", "lfsFile")]
    paths = [each.path for each in added]
    folders = read_folders(repository, head, folders_of([*paths, ATTRIBUTES_FILE]))
    stored = _store_attributes(repository, body, added)
    attributes = _attributes_after(attributes_files(folders), stored, body.operations)
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
            folder, _, name = path.rpartition("/")
            present = folders[folder].get(name)
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


def attributes_files(folders: Folders) -> dict[str, str]:
    """Maps the path of each `.gitattributes` to the sha of its blob."""
    return {
        entry.path: entry.oid
        for entries in folders.values()
        if (entry := entries.get(ATTRIBUTES_FILE)) is not None and entry.type == "file"
    }


def _attributes_after(
    before: Mapping[str, str], stored: Mapping[str, str], operations: Iterable[Operation]
) -> dict[str, str]:
    """The `.gitattributes` files after the commit, with the shas of their blobs. `before` are the
    present ones. `stored` are those that the commit adds, and may delete afterwards."""
    added, deleted = {}, {}
    for number, operation in enumerate(operations, start=1):
        if operation.path in stored and operation.kind == "file":
            added[operation.path] = number
        elif operation.kind in ("deletedFile", "deletedFolder"):
            deleted[operation.path] = number
    return {
        path: sha
        for path, sha in {**before, **stored}.items()
        if all(deleted.get(each, 0) <= added.get(path, 0) for each in (path, *parents_of(path)))
    }


def _store_attributes(
    repository: Repository, body: CommitBody, added: Iterable[Operation]
) -> dict[str, str]:
    """Stores the content of each added `.gitattributes`, and maps its path to the sha of its blob.
    Stores all of them with one process, because a commit may add very many."""
    blobs: dict[str, str] = {}

    def stream() -> Iterator[bytes]:
        for operation in operations:
            content = body.content(operation)
            blobs[operation.path] = blob_sha(content)
            yield b"blob\ndata %d\n%b\n" % (len(content), content)
        yield b"done\n"

    operations = [
        each
        for each in added
        if each.path.rpartition("/")[2] == ATTRIBUTES_FILE and each.kind == "file"
    ]
    if operations:
        run_fast_import(repository, stream())
    return blobs
