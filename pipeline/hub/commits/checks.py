"""Checks the changes of a commit that comes over the API, before the commit is made."""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.hub.contents.trees import Folders, read_folders
from pipeline.hub.errors import BadRequest, EntryNotFound
from pipeline.hub.git.process import git
from pipeline.hub.repositories.names import folders_of, parents_of
from pipeline.hub.repositories.store import Repository

# `huggingface_hub` looks for these words in the error, and then explains how to delete a folder.
_NOT_THERE = "A file with this name doesn't exist"
_BATCH_BYTES = 16 * 1024 * 1024
# Matches `.gitmodules`, `.gitattributes`, and names that some file systems read as one of these
# two, such as `GITMOD~1`.
_CHECKED = re.compile(r"\W*\.git\W*(modules|attributes).*|gi.*~.*", re.IGNORECASE | re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file or folder of a commit. The changes of a commit apply in their order."""

    action: Literal["add", "delete file", "delete folder"]
    path: str
    read: Callable[[], bytes] = bytes
    """Returns what git stores for an added file: its content, or the pointer to a large file."""


def check_changes(changes: Sequence[Change], repository: Repository, head: str | None) -> None:
    """Applies the changes, in their order and only in memory, to the tree of `head`, or to an empty
    tree if `head` is None. Raises EntryNotFound if a change deletes something that does not exist.
    Raises BadRequest if a change adds a file where a folder is, or below another file."""
    tree = _Tree(read_folders(repository, head, folders_of(each.path for each in changes)))
    for change in changes:
        kind = tree.kind(change.path)
        if change.action == "add":
            above = next(
                (each for each in parents_of(change.path) if tree.kind(each) == "file"), None
            )
            if above is not None:
                raise BadRequest(
                    f"{change.path!r} cannot be added, because {above!r} is a file: delete "
                    f"{above!r} earlier in the same commit, or choose another path."
                )
            if kind == "folder":
                raise BadRequest(
                    f"{change.path!r} cannot be added as a file, because it is a folder: delete "
                    "the folder earlier in the same commit, or choose another path."
                )
            tree.add(change.path)
        elif kind != change.action.removeprefix("delete "):
            raise EntryNotFound(f"{_NOT_THERE}: {change.path}", commit=head or "")
        else:
            tree.delete(change.path)


class _Tree:
    """Knows which paths are files and which are folders, while changes apply one after the other.

    The changes are numbered. For each path, this stores the number of the last change that added
    the path, and of the last change that deleted it. An added path exists if neither the path nor a
    folder above it was deleted later. So the time for one change does not grow with the number of
    changes.
    """

    def __init__(self, folders: Folders) -> None:
        self._folders = folders
        self._now = 0
        self._added: dict[str, int] = {}
        self._made: dict[str, int] = {}
        """For each folder above an added file, the number of the last change that added one."""
        self._deleted: dict[str, int] = {}

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        deleted = max(self._deleted.get(each, 0) for each in (path, *parents_of(path)))
        if self._added.get(path, 0) > deleted:
            return "file"
        if self._made.get(path, 0) > deleted:
            return "folder"
        if deleted:
            return None
        folder, _, name = path.rpartition("/")
        entry = self._folders.get(folder, {}).get(name)
        if entry is None:
            return None
        return "folder" if entry.type == "directory" else "file"

    def add(self, path: str) -> None:
        self._now += 1
        self._added[path] = self._now
        for folder in parents_of(path):
            self._made[folder] = self._now

    def delete(self, path: str) -> None:
        self._now += 1
        self._deleted[path] = self._now


def check_files(files: Iterable[tuple[str, Callable[[], bytes]]]) -> None:
    """Raises BadRequest if git would refuse one of the files in a push. `files` are paths, each
    with a function that returns the content. Only files that git itself reads, such as
    `.gitmodules`, are checked and read.

    Git checks such files when they are pushed. The commits of the API are made by
    `git fast-import`, which does not check them. A wrong `.gitmodules` may harm a person who
    clones the repository. And another server that checks the files would refuse the history.
    """
    batch: list[tuple[str, bytes]] = []
    num_bytes = 0
    for path, read in files:
        if _CHECKED.fullmatch(path.rpartition("/")[2]):
            batch.append((path, read()))
            num_bytes += len(batch[-1][1])
        if num_bytes > _BATCH_BYTES:
            _check_batch(batch)
            batch, num_bytes = [], 0
    if batch:
        _check_batch(batch)


def _check_batch(files: list[tuple[str, bytes]]) -> None:
    with tempfile.TemporaryDirectory() as place:
        # The files go into a new repository, so that git checks nothing else.
        folder = Path(place)
        git(folder, "init", "--quiet", "--bare", "--template=")
        stream = [b"commit refs/heads/main\ncommitter hub <hub@localhost> 0 +0000\ndata 0\n"]
        for number, (path, content) in enumerate(files):
            name = path.rpartition("/")[2].replace("\\", "\\\\").replace('"', '\\"')
            stream.append(f'M 100644 inline "{number}/{name}"\ndata {len(content)}\n'.encode())
            stream += [content, b"\n"]
        git(folder, "fast-import", "--quiet", stdin=b"".join(stream))
        complaints: list[str] = []
        git(folder, "fsck", "--no-dangling", may_exit_with=range(1, 256), complaints=complaints)
    errors = [line for line in complaints if line.startswith("error in ")]
    if errors:
        # A line is "error in blob <sha>: <reason>". If it is about a tree, no file has its sha, and
        # each file may be the wrong one.
        shas = {line.partition(": ")[0].rpartition(" ")[2] for line in errors}
        wrong = [path for path, content in files if blob_sha(content) in shas]
        names = ", ".join(repr(path) for path in (wrong or [path for path, _ in files])[:5])
        reasons = "; ".join(line.partition(": ")[2] for line in errors[:5])
        raise BadRequest(f"Git refuses {names} in a push: {reasons}. Correct the file.")


def blob_sha(content: bytes) -> str:
    """The sha that git gives to a file with this content."""
    return hashlib.sha1(b"blob %d\0%b" % (len(content), content)).hexdigest()
