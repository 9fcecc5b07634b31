"""Checks the changes of a commit that comes over the API, before the commit is made."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.hub.contents.trees import Entry, read_tree
from pipeline.hub.errors import BadRequest, EntryNotFound
from pipeline.hub.repositories.names import parents_of
from pipeline.hub.repositories.store import Repository

# `huggingface_hub` looks for these words in the error, and then explains how to delete a folder.
_NOT_THERE = "A file with this name doesn't exist"


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
    tree = _Tree(read_tree(repository, head))
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
    As in git, a folder exists only as long as there is something in it."""

    def __init__(self, entries: Mapping[str, Entry]) -> None:
        self._files: set[str] = set()
        self._num_files: Counter[str] = Counter()
        """How many files are below each folder."""
        for path, entry in entries.items():
            if entry.type == "file":
                self.add(path)

    def kind(self, path: str) -> Literal["file", "folder"] | None:
        return "file" if path in self._files else "folder" if self._num_files[path] else None

    def file_above(self, path: str) -> str | None:
        """The part of `path` that is a file, so that nothing can be below it."""
        return next((each for each in parents_of(path) if each in self._files), None)

    def add(self, path: str) -> None:
        if path not in self._files:
            self._files.add(path)
            self._num_files.update(parents_of(path))

    def delete(self, path: str) -> None:
        """Deletes a file, or all files of a folder."""
        is_file = path in self._files
        for file in [path] if is_file else [f for f in self._files if f.startswith(f"{path}/")]:
            self._files.remove(file)
            self._num_files.subtract(parents_of(file))
