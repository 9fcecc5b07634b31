"""Reads what is in a repository at a revision: commits, trees, blobs. It never changes one."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.hub.blobs import read_pointers
from pipeline.hub.errors import EntryNotFound, RevisionNotFound
from pipeline.hub.git_process import git, git_environment
from pipeline.hub.names import SHA, is_ref_name
from pipeline.hub.repositories import Repository
from pipeline.pointers import Pointer, may_be_pointer

SMALL_FILE_BYTES = 1024 * 1024
_CHUNK_BYTES = 256 * 1024
# 9999-12-31: anybody may write any date into a commit, and a calendar ends there.
_LATEST_SECONDS = 253402300799
_ABBREVIATED = re.compile(r"[0-9a-f]{7,39}")


@dataclass(frozen=True, kw_only=True)
class Entry:
    type: Literal["file", "directory"]
    path: str
    oid: str
    """The sha-1 of git's blob or tree."""
    size_bytes: int = 0
    """Of git's blob, also where it is a pointer."""
    lfs: Pointer | None = None
    """The large file that the blob points to; None where it is no pointer."""

    @property
    def content_bytes(self) -> int:
        """What a reader of the file gets."""
        return self.size_bytes if self.lfs is None else self.lfs.size


@dataclass(frozen=True, kw_only=True)
class Commit:
    sha: str
    author: str
    committed_at: int
    """Seconds since the epoch, UTC."""
    title: str
    message: str


def resolve_revision(repository: Repository, revision: str) -> str:
    """The sha of the commit that a branch, tag, full ref or sha (7 digits or more) names.

    Raises RevisionNotFound. A sha resolves whether or not a ref still reaches it.
    """
    for found in _look_up(repository, [f"{name}^{{commit}}" for name in _candidates(revision)]):
        if found is not None:
            return found[0]
    raise _no_revision(repository, revision)


def find_file(repository: Repository, revision: str, path: str) -> tuple[str, Entry]:
    """The commit and the file, of which only git's blob is known. Raises RevisionNotFound or
    EntryNotFound."""
    # One git process for both questions: this is what a client asks most.
    names = _candidates(revision)
    found = _look_up(
        repository, [f"{name}{what}" for name in names for what in ("^{commit}", f":{path}")]
    )
    for commit, file in zip(found[::2], found[1::2], strict=True):
        if commit is None:
            continue
        if file is None or file[1] != "blob":
            raise EntryNotFound(
                f"The {repository.name} has no file {path!r} at {revision}.", commit=commit[0]
            )
        return commit[0], Entry(type="file", path=path, oid=file[0], size_bytes=file[2])
    raise _no_revision(repository, revision)


def list_tree(
    repository: Repository, commit: str, folder: str = "", *, recursive: bool
) -> list[Entry]:
    """Files and folders below `folder`, in git's order. Raises EntryNotFound."""
    if folder:
        [found] = _look_up(repository, [f"{commit}:{folder}"])
        if found is None or found[1] != "tree":
            raise EntryNotFound(
                f"The {repository.name} has no folder {folder!r} at {commit}.", commit=commit
            )
    options = ["-r", "-t"] if recursive else []
    output = git(repository.folder, "ls-tree", "-z", "-l", *options, f"{commit}:{folder}")
    return _with_pointers(repository, list(_parse_tree(output, f"{folder}/" if folder else "")))


def find_paths(repository: Repository, commit: str, paths: Sequence[str]) -> list[Entry]:
    """Those of `paths` that exist, in their order."""
    found = _look_up(repository, [f"{commit}:{path}" for path in paths])
    entries = []
    for path, item in zip(paths, found, strict=True):
        if item is not None and item[1] == "blob":
            entries.append(Entry(type="file", path=path, oid=item[0], size_bytes=item[2]))
        elif item is not None and item[1] == "tree":
            entries.append(Entry(type="directory", path=path, oid=item[0]))
    return _with_pointers(repository, entries)


def list_commits(repository: Repository, commit: str, *, skip: int, limit: int) -> list[Commit]:
    """Newest first."""
    output = git(
        repository.folder,
        "log",
        "-z",
        "--encoding=UTF-8",
        "--format=%H%x1f%an%x1f%ct%x1f%s%x1f%b",
        f"--skip={skip}",
        f"--max-count={limit}",
        commit,
        "--",
    )
    records = output.decode(errors="replace").split("\0") if output else []
    commits = []
    for record in records:
        if not record.strip():
            continue
        sha, author, seconds, title, message = record.split("\x1f", 4)
        commits.append(
            Commit(
                sha=sha,
                author=author,
                committed_at=min(int(seconds or 0), _LATEST_SECONDS),
                title=title,
                message=message.strip(),
            )
        )
    return commits


def peeled_refs(repository: Repository, prefix: str) -> list[tuple[str, str]]:
    """(name below `prefix`, the commit it leads to), for `refs/heads/` or `refs/tags/`."""
    output = git(
        repository.folder,
        "for-each-ref",
        "--format=%(refname) %(objectname) %(*objectname)",
        prefix,
    )
    fields = (line.split(" ") for line in output.decode(errors="replace").splitlines())
    return [(ref.removeprefix(prefix), peeled or sha) for ref, sha, peeled in fields]


def read_file(repository: Repository, file: Entry) -> bytes:
    """The whole file; for small ones, where a stream costs more than the bytes."""
    return git(repository.folder, "cat-file", "blob", file.oid)


async def stream_file(
    repository: Repository, file: Entry, *, start: int, length: int
) -> AsyncIterator[bytes]:
    """`length` bytes of the file from `start` on, never more than a chunk in memory."""
    if length == 0:
        return
    process = await asyncio.create_subprocess_exec(
        "git",
        f"--git-dir={repository.folder}",
        "cat-file",
        "blob",
        file.oid,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=git_environment(),
        limit=_CHUNK_BYTES,
    )
    assert process.stdout is not None
    try:
        while length and (chunk := await process.stdout.read(_CHUNK_BYTES)):
            start, chunk = max(0, start - len(chunk)), chunk[start : start + length]
            length -= len(chunk)
            if chunk:
                yield chunk
    finally:
        # Not Process.kill: it reaps a process that ended, before asyncio's own watcher can.
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        # To its end: until then the pipe stays open, and asyncio's `wait` waits for it.
        while await process.stdout.read(_CHUNK_BYTES):
            pass
        await process.wait()


def _with_pointers(repository: Repository, entries: Sequence[Entry]) -> list[Entry]:
    small = [entry.oid for entry in entries if may_be_pointer(entry.size_bytes)]
    pointers = read_pointers(repository, small)
    return [replace(entry, lfs=pointers.get(entry.oid)) for entry in entries]


def _no_revision(repository: Repository, revision: str) -> RevisionNotFound:
    branches = [name for name, _ in peeled_refs(repository, "refs/heads/")]
    if not branches:
        return RevisionNotFound(
            f"The {repository.name} has no commit yet: push one with "
            f"`git push <this hub>/{repository.name.path} HEAD:main`."
        )
    return RevisionNotFound(
        f"The {repository.name} has no branch, tag or commit {revision!r}; "
        f"its branches are {', '.join(branches[:10])}."
    )


def _candidates(revision: str) -> list[str]:
    if SHA.fullmatch(revision):
        return [revision]
    if not is_ref_name(revision):
        return []
    if revision == "HEAD" or revision.startswith("refs/"):
        return [revision]
    names = [f"refs/heads/{revision}", f"refs/tags/{revision}"]
    return [*names, revision] if _ABBREVIATED.fullmatch(revision) else names


def _look_up(
    repository: Repository, expressions: Sequence[str]
) -> list[tuple[str, str, int] | None]:
    """(sha, type, size in bytes) for each expression, None where git knows no such object."""
    stdin = "".join(f"{expression}\n" for expression in expressions).encode()
    output = git(repository.folder, "cat-file", "--batch-check", stdin=stdin)
    found: list[tuple[str, str, int] | None] = []
    for line in output.decode(errors="replace").splitlines():
        fields = line.split(" ")
        # "<expression> missing" and "<expression> ambiguous" are what else git says.
        if len(fields) == 3 and SHA.fullmatch(fields[0]) and fields[2].isdigit():
            found.append((fields[0], fields[1], int(fields[2])))
        else:
            found.append(None)
    return found


def _parse_tree(output: bytes, prefix: str) -> Iterator[Entry]:
    for record in output.decode(errors="replace").split("\0"):
        if not record:
            continue
        facts, _, path = record.partition("\t")
        _, type, oid, size = facts.split()
        if type == "blob":
            yield Entry(type="file", path=prefix + path, oid=oid, size_bytes=int(size))
        elif type == "tree":
            yield Entry(type="directory", path=prefix + path, oid=oid)
