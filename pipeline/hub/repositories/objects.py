"""Looks up git's objects, and finds the pointers to large files among them, with few processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.formats import Pointer, may_be_pointer
from pipeline.hub.git.process import git, lines_of
from pipeline.hub.repositories.names import SHA
from pipeline.hub.repositories.store import Repository

_BLOBS_PER_PROCESS = 10_000

Object = tuple[str, str, int]
"""The sha, the type and the size in bytes of one of git's objects."""


def look_up(repository: Repository, expressions: Iterable[str]) -> list[Object | None]:
    """The object of each expression such as `main:README.md`. None if git has no such object."""
    stdin = "".join(f"{expression}\n" for expression in expressions).encode()
    output = git(repository.folder, "cat-file", "--batch-check", stdin=stdin)
    return [_object(line) for line in lines_of(output)]


def all_objects(repository: Repository) -> list[Object]:
    """Every object of the repository, whether or not a ref leads to it."""
    options = ("--batch-check", "--batch-all-objects", "--unordered")
    output = git(repository.folder, "cat-file", *options)
    return [found for line in lines_of(output) if (found := _object(line)) is not None]


def _object(line: str) -> Object | None:
    fields = line.split(" ")
    # If there is no such object, git prints "<expression> missing" or "<expression> ambiguous".
    if len(fields) == 3 and SHA.fullmatch(fields[0]) and fields[2].isdigit():
        return fields[0], fields[1], int(fields[2])
    return None


def all_commits(repository: Repository) -> list[str]:
    """Every commit of the repository, whether or not a ref leads to it."""
    return [sha for sha, kind, _ in all_objects(repository) if kind == "commit"]


def pointers_of(repository: Repository, objects: Iterable[Object | None]) -> Mapping[str, Pointer]:
    """The pointers among the objects, by the sha of the blob. Reads only the small blobs."""
    small = [
        found[0] for found in objects if found and found[1] == "blob" and may_be_pointer(found[2])
    ]
    return {
        sha: pointer
        for sha, content in read_blobs(repository, small)
        if (pointer := Pointer.parse(content)) is not None
    }


def read_blobs(repository: Repository, shas: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The sha and the content of each of these blobs. Skips blobs that git does not have. Up to
    `_BLOBS_PER_PROCESS` contents are in memory at the same time, so the blobs must be small."""
    unique = list(dict.fromkeys(shas))
    for first in range(0, len(unique), _BLOBS_PER_PROCESS):
        stdin = "".join(f"{sha}\n" for sha in unique[first : first + _BLOBS_PER_PROCESS]).encode()
        output = git(repository.folder, "cat-file", "--batch", stdin=stdin)
        start = 0
        while start < len(output):
            end = output.index(b"\n", start)
            # Git prints "<sha> <type> <size>" and then the content, or only "<sha> missing".
            sha, *facts = output[start:end].decode().split()
            start = end + 1
            if len(facts) == 2:
                size = int(facts[1])
                yield sha, output[start : start + size]
                start += size + 1
