"""Reads many small files of a repository in few git processes, and finds the pointers in them."""

from collections.abc import Iterator, Mapping, Sequence

from pipeline.hub.git_process import git
from pipeline.hub.pointers import Pointer
from pipeline.hub.repositories import Repository

_BLOBS_PER_PROCESS = 10_000


def read_pointers(repository: Repository, oids: Sequence[str]) -> Mapping[str, Pointer]:
    """Those of the small blobs `oids` that are pointers. The others are passed over."""
    unique = list(dict.fromkeys(oids))
    return {
        oid: pointer
        for start in range(0, len(unique), _BLOBS_PER_PROCESS)
        for oid, content in _read(repository, unique[start : start + _BLOBS_PER_PROCESS])
        if (pointer := Pointer.parse(content)) is not None
    }


def _read(repository: Repository, oids: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    if not oids:
        return
    stdin = "".join(f"{oid}\n" for oid in oids).encode()
    output = git(repository.folder, "cat-file", "--batch", stdin=stdin)
    start = 0
    while start < len(output):
        end = output.index(b"\n", start)
        # "<oid> <type> <size>", or "<oid> missing".
        oid, *facts = output[start:end].decode().split()
        start = end + 1
        if len(facts) == 2:
            size = int(facts[1])
            yield oid, output[start : start + size]
            start += size + 1
