"""Checks the changes of a commit that comes over the API, before the commit is made."""

import hashlib
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from pipeline.hub.contents.trees import Folders, read_folders
from pipeline.hub.errors import BadRequest, EntryNotFound
from pipeline.hub.git.process import git
from pipeline.hub.repositories.names import folders_of
from pipeline.hub.repositories.store import Repository

# `huggingface_hub` looks for these words in the error, and then explains how to delete a folder.
_NOT_THERE = "A file with this name doesn't exist"
_BATCH_BYTES = 16 * 1024 * 1024
# Matches `.gitmodules`, `.gitattributes`, and names that some file systems read as one of these
# two, such as `GITMOD~1`.
_CHECKED = re.compile(r"\W*\.git\W*(modules|attributes).*|gi.*~.*", re.IGNORECASE | re.DOTALL)

_Node: TypeAlias = "_Folder | Literal['file']"
_Folder: TypeAlias = "dict[str, _Node]"
"""Maps the names in a folder to its files and folders. A folder of which no change names a part is
not read. It has one entry without a name, because it is not empty."""


@dataclass(frozen=True, kw_only=True)
class Change:
    """One file or folder of a commit. The changes of a commit apply in their order."""

    action: Literal["add", "delete file", "delete folder"]
    path: str
    read: Callable[[], bytes] = bytes
    """Returns what git stores for an added file: its content, or the pointer to a large file."""
    is_executable: bool = False
    """A client of the API cannot set this. A changed file stays executable."""


def check_changes(changes: Sequence[Change], repository: Repository, head: str | None) -> None:
    """Applies the changes, in their order and only in memory, to the tree of `head`, or to an empty
    tree if `head` is None. Raises EntryNotFound if a change deletes something that does not exist.
    Raises BadRequest if a change adds a file where a folder is, or below another file."""
    tree = _Tree(read_folders(repository, head, folders_of(each.path for each in changes)))
    for change in changes:
        kind = tree.kind(change.path)
        if change.action == "add":
            above = tree.file_above(change.path)
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
    As in git, a folder exists only as long as there is something in it.

    The time for one change depends on the depth of its path, not on the number of changes.
    """

    def __init__(self, folders: Folders) -> None:
        read: dict[str, _Folder] = {path: {} for path, entries in folders.items() if entries}
        self._root = read.setdefault("", {})
        for path, folder in read.items():
            for name, entry in folders[path].items():
                is_folder = entry.type == "directory"
                folder[name] = read.get(entry.path, {"": "file"}) if is_folder else "file"

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        found: _Node | None = self._root
        for name in path.split("/"):
            found = found.get(name) if isinstance(found, dict) else None
        return "folder" if isinstance(found, dict) else found

    def file_above(self, path: str) -> str | None:
        """The part of `path` that is a file, so that nothing can be below it."""
        names = path.split("/")
        found: _Node | None = self._root
        for depth, name in enumerate(names[:-1], start=1):
            found = found.get(name) if isinstance(found, dict) else None
            if found == "file":
                return "/".join(names[:depth])
        return None

    def add(self, path: str) -> None:
        *above, name = path.split("/")
        folder = self._root
        for each in above:
            below = folder.setdefault(each, {})
            assert isinstance(below, dict)
            folder = below
        folder[name] = "file"

    def delete(self, path: str) -> None:
        """Deletes a file or folder that exists, and each folder above it that is then empty."""
        names = path.split("/")
        folders = [self._root]
        for name in names[:-1]:
            below = folders[-1][name]
            assert isinstance(below, dict)
            folders.append(below)
        for folder, name in zip(reversed(folders), reversed(names), strict=True):
            del folder[name]
            if folder:
                break


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
        # On Windows, a backslash ends a folder's name, so git checks the name after it.
        if _CHECKED.fullmatch(re.split(r"[/\\]", path)[-1]):
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
