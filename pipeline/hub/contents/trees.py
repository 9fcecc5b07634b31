"""Reads the trees and files of a repository. Changes nothing in it."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.formats import Pointer
from pipeline.hub.errors import EntryNotFound, RequestError
from pipeline.hub.git.process import git, output_of
from pipeline.hub.repositories.names import is_path
from pipeline.hub.repositories.objects import look_up, pointers_of
from pipeline.hub.repositories.store import Repository

SMALL_FILE_BYTES = 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


@dataclass(frozen=True, kw_only=True)
class Entry:
    type: Literal["file", "directory"]
    path: str
    oid: str
    """The SHA-1 of git's blob or tree."""
    size_bytes: int = 0
    """The size of git's blob. The blob of a large file is its pointer. 0 for a folder, or if the
    size was not read."""
    is_executable: bool = False
    lfs: Pointer | None = None
    """The pointer, if the blob is a pointer to a large file. None for other blobs, or if the blob
    was not read."""

    @property
    def content_bytes(self) -> int:
        """The size of what a reader gets: the large file if the blob is a pointer, else the
        blob."""
        return self.size_bytes if self.lfs is None else self.lfs.size


def list_tree(
    repository: Repository, commit: str, folder: str = "", *, recursive: bool
) -> list[Entry]:
    """The files and folders in `folder` (`""` is the root), in git's order. Raises EntryNotFound if
    there is no such folder."""
    if folder:
        found = find_paths(repository, commit, [folder])
        if not found or found[0].type != "directory":
            raise EntryNotFound(
                f"The {repository.name} has no folder {folder!r} in the commit {commit}.",
                commit=commit,
            )
    options = ["-r", "-t"] if recursive else []
    output = git(repository.folder, "ls-tree", "-z", "-l", *options, f"{commit}:{folder}")
    return _with_pointers(repository, list(_parse_tree(output, f"{folder}/" if folder else "")))


def find_paths(repository: Repository, commit: str, paths: Sequence[str]) -> list[Entry]:
    """The entries of the `paths` that exist, in the order of `paths`. `commit` is a sha: after the
    name of a branch, a path could mean something else to git."""
    paths = [path for path in paths if is_path(path)]
    found = look_up(repository, [f"{commit}:{path}" for path in paths])
    entries = []
    for path, item in zip(paths, found, strict=True):
        if item is not None and item[1] == "blob":
            entries.append(Entry(type="file", path=path, oid=item[0], size_bytes=item[2]))
        elif item is not None and item[1] == "tree":
            entries.append(Entry(type="directory", path=path, oid=item[0]))
    return _with_pointers(repository, entries)


def read_tree(repository: Repository, commit: str | None) -> Mapping[str, Entry]:
    """Every file and folder of the commit, by its path. Faster than `list_tree`, because it reads
    neither sizes nor pointers. Empty if `commit` is None."""
    if commit is None:
        return {}
    output = git(repository.folder, "ls-tree", "-z", "-r", "-t", commit)
    return {entry.path: entry for entry in _parse_tree(output, "")}


def list_paths(repository: Repository, commit: str) -> list[str]:
    """The path of every file. Faster than `list_tree`, which also looks up sizes and pointers."""
    output = git(repository.folder, "ls-tree", "-r", "-z", "--name-only", commit)
    return output.decode(errors="replace").split("\0")[:-1]


def changed_files(repository: Repository, before: str | None, after: str) -> list[Entry]:
    """The files of the commit `after` that `before` does not have, or has with other content. All
    files if `before` is None."""
    output = git(
        repository.folder,
        *("diff-tree", "-r", "-z", "--no-renames", "--diff-filter=AMT"),
        before or _EMPTY_TREE,
        after,
    )
    fields = output.decode(errors="replace").split("\0")
    # Git prints two fields for each file: ":<mode> <mode> <sha> <sha> <letter>", and the path.
    facts = [field.split(" ") for field in fields[:-1:2]]
    paths = fields[1::2]
    files = [
        (path, fact[3])
        for fact, path in zip(facts, paths, strict=False)
        if fact[1] in ("100644", "100755")
    ]
    sizes = look_up(repository, [oid for _, oid in files])
    return [
        Entry(type="file", path=path, oid=oid, size_bytes=found[2] if found else 0)
        for (path, oid), found in zip(files, sizes, strict=True)
    ]


def read_file(repository: Repository, file: Entry) -> bytes:
    """The complete content. For small files, this is faster than `stream_file`."""
    return git(repository.folder, "cat-file", "blob", file.oid)


async def stream_file(
    repository: Repository, file: Entry, *, start: int, length: int
) -> AsyncIterator[bytes]:
    """Gives `length` bytes of the file from the offset `start`. Only one chunk is in memory."""
    if length == 0:
        return
    with output_of(repository.folder, "cat-file", "blob", file.oid) as output:
        while length and (chunk := await asyncio.to_thread(output.read, _CHUNK_BYTES)):
            start, chunk = max(0, start - len(chunk)), chunk[start : start + length]
            length -= len(chunk)
            if chunk:
                yield chunk


def _with_pointers(repository: Repository, entries: Sequence[Entry]) -> list[Entry]:
    pointers = pointers_of(repository, [(each.oid, "blob", each.size_bytes) for each in entries])
    return [replace(entry, lfs=pointers.get(entry.oid)) for entry in entries]


def _parse_tree(output: bytes, prefix: str) -> Iterator[Entry]:
    """The entries that `git ls-tree -z` printed, with `prefix` before each path. Leaves out
    submodules, and names that are not UTF-8 or have a control character. No client can ask for
    them, so a client that wants to download all listed files would fail. Raises RequestError
    if git printed sizes (`-l`) and an object is missing."""
    for record in output.split(b"\0"):
        facts, _, name = record.partition(b"\t")
        try:
            path = name.decode()
        except UnicodeDecodeError:
            continue
        if not is_path(path):
            continue
        mode, type, oid, *size = facts.decode().split()
        if type == "blob":
            if size == ["BAD"]:
                raise RequestError(
                    f"The repository is damaged: the object {oid} is missing. `pipeline doctor` "
                    "says how to restore it."
                )
            yield Entry(
                type="file",
                path=prefix + path,
                oid=oid,
                size_bytes=int(size[0]) if size else 0,
                is_executable=mode == "100755",
            )
        elif type == "tree":
            yield Entry(type="directory", path=prefix + path, oid=oid)
