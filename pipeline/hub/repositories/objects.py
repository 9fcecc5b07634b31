"""Looks up git's objects, and finds the pointers to large files among them, with few processes."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from pipeline.hub.git.process import git, lines_of
from pipeline.hub.repositories.names import SHA
from pipeline.hub.repositories.store import Repository
from pipeline.pointers import Pointer, may_be_pointer

_BLOBS_PER_PROCESS = 10_000


def look_up(
    repository: Repository, expressions: Sequence[str]
) -> list[tuple[str, str, int] | None]:
    """For each expression such as `main:README.md`, the sha, the type and the size in bytes of its
    object. None if git has no such object."""
    stdin = "".join(f"{expression}\n" for expression in expressions).encode()
    output = git(repository.folder, "cat-file", "--batch-check", stdin=stdin)
    found: list[tuple[str, str, int] | None] = []
    for line in lines_of(output):
        fields = line.split(" ")
        # If there is no such object, git prints "<expression> missing" or "<expression> ambiguous".
        if len(fields) == 3 and SHA.fullmatch(fields[0]) and fields[2].isdigit():
            found.append((fields[0], fields[1], int(fields[2])))
        else:
            found.append(None)
    return found


def read_pointers(repository: Repository, oids: Sequence[str]) -> Mapping[str, Pointer]:
    """The pointers among the small blobs `oids`, by the blob's sha. Skips all other blobs."""
    return {
        oid: pointer
        for oid, content in read_blobs(repository, oids)
        if (pointer := Pointer.parse(content)) is not None
    }


def read_blobs(repository: Repository, oids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """The sha and the content of each of these blobs. Skips blobs that git does not have. Up to
    `_BLOBS_PER_PROCESS` contents are in memory at the same time, so the blobs must be small."""
    unique = list(dict.fromkeys(oids))
    for start in range(0, len(unique), _BLOBS_PER_PROCESS):
        yield from _read(repository, unique[start : start + _BLOBS_PER_PROCESS])


def all_commits(repository: Repository) -> list[str]:
    """Every commit of the repository, whether or not a ref leads to it."""
    check = "--batch-check=%(objecttype) %(objectname)"
    listed = git(repository.folder, "cat-file", check, "--batch-all-objects", "--unordered")
    found = (line.split(" ") for line in lines_of(listed))
    return [sha for kind, sha in found if kind == "commit"]


def all_pointers(repository: Repository) -> set[Pointer]:
    """The pointers among all objects of the repository, whether or not a commit leads to them."""
    return _pointers(repository, ["--batch-all-objects", "--unordered"], b"")


def reachable_pointers(repository: Repository) -> set[Pointer]:
    """The pointers in all commits that a ref leads to."""
    listed = git(repository.folder, "rev-list", "--all", "--objects", "--no-object-names")
    return _pointers(repository, [], listed)


def pointers_of(repository: Repository, oids: Iterable[str]) -> Mapping[str, Pointer]:
    """The pointers among the blobs `oids`, by the blob's sha. Reads only the small blobs."""
    listed = "".join(f"{oid}\n" for oid in oids).encode()
    return read_pointers(repository, _small_blobs(repository, [], listed))


def _pointers(repository: Repository, options: Sequence[str], stdin: bytes) -> set[Pointer]:
    return set(read_pointers(repository, _small_blobs(repository, options, stdin)).values())


def _small_blobs(repository: Repository, options: Sequence[str], stdin: bytes) -> list[str]:
    check = "--batch-check=%(objectname) %(objecttype) %(objectsize)"
    listed = git(repository.folder, "cat-file", check, *options, stdin=stdin)
    small = []
    for line in listed.decode().splitlines():
        oid, kind, size = line.split(" ")
        if kind == "blob" and may_be_pointer(int(size)):
            small.append(oid)
    return small


def _read(repository: Repository, oids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    if not oids:
        return
    stdin = "".join(f"{oid}\n" for oid in oids).encode()
    output = git(repository.folder, "cat-file", "--batch", stdin=stdin)
    start = 0
    while start < len(output):
        end = output.index(b"\n", start)
        # Git prints "<oid> <type> <size>" and then the content, or only "<oid> missing".
        oid, *facts = output[start:end].decode().split()
        start = end + 1
        if len(facts) == 2:
            size = int(facts[1])
            yield oid, output[start : start + size]
            start += size + 1
