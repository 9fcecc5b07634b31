"""Reads what is in a repository at a revision: commits, trees, blobs. It never changes one."""

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.hub.blobs import read_pointers
from pipeline.hub.errors import EntryNotFound, RevisionNotFound
from pipeline.hub.git_process import git, git_environment, lines_of
from pipeline.hub.names import SHA, is_ref_name
from pipeline.hub.repositories import Repository
from pipeline.pointers import Pointer, may_be_pointer

SMALL_FILE_BYTES = 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_SHA_BYTES = 20
_EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"
# 9999-12-31: anybody may write any date into a commit, and a calendar ends there.
_LATEST_SECONDS = 253402300799
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
# What a file system takes, and far below what one argument of a program may have.
_PATH_MAX_BYTES = 4096
_ABBREVIATED = re.compile(r"[0-9a-f]{7,39}")


# Only a line feed can be in no author's name and in no title.
_AS_RECORDS = ("-z", "--encoding=UTF-8", "--format=%H%n%an%n%ct%n%s%n%b")


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


@dataclass(frozen=True, kw_only=True)
class CommitHead:
    """What a commit object says."""

    tree: str
    parents: tuple[str, ...]
    message: str


Folders = Mapping[str, Mapping[str, Entry]]
"""Of each folder, its entries by name. A folder that does not exist has none."""


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
    if _CONTROL.search(path):
        sha = resolve_revision(repository, revision)
        for odd in _odd_entries(repository, sha, [path]):
            if odd.type == "file":
                return sha, odd
        raise _no_file(repository, revision, path, sha)
    # One git process for both questions: this is what a client asks most.
    names = _candidates(revision)
    found = _look_up(
        repository, [f"{name}{what}" for name in names for what in ("^{commit}", f":{path}")]
    )
    for commit, file in zip(found[::2], found[1::2], strict=True):
        if commit is None:
            continue
        if file is None or file[1] != "blob":
            raise _no_file(repository, revision, path, commit[0])
        return commit[0], Entry(type="file", path=path, oid=file[0], size_bytes=file[2])
    raise _no_revision(repository, revision)


def list_tree(
    repository: Repository, commit: str, folder: str = "", *, recursive: bool
) -> list[Entry]:
    """Files and folders below `folder`, in git's order. Raises EntryNotFound."""
    if folder:
        found = find_paths(repository, commit, [folder])
        if not found or found[0].type != "directory":
            raise EntryNotFound(
                f"The {repository.name} has no folder {folder!r} at {commit}.", commit=commit
            )
    options = ["-r", "-t"] if recursive else []
    output = git(repository.folder, "ls-tree", "-z", "-l", *options, f"{commit}:{folder}")
    return _with_pointers(repository, list(_parse_tree(output, f"{folder}/" if folder else "")))


def find_paths(repository: Repository, commit: str, paths: Sequence[str]) -> list[Entry]:
    """Those of `paths` that exist, in their order."""
    usual = [path for path in paths if not _CONTROL.search(path)]
    found: dict[str, Entry] = {}
    for path, item in zip(
        usual, _look_up(repository, [f"{commit}:{path}" for path in usual]), strict=True
    ):
        if item is not None and item[1] == "blob":
            found[path] = Entry(type="file", path=path, oid=item[0], size_bytes=item[2])
        elif item is not None and item[1] == "tree":
            found[path] = Entry(type="directory", path=path, oid=item[0])
    odd = [path for path in paths if _CONTROL.search(path)]
    found |= {entry.path: entry for entry in _odd_entries(repository, commit, odd)}
    return _with_pointers(repository, [found[path] for path in paths if path in found])


def read_commit(repository: Repository, sha: str) -> CommitHead:
    head, _, message = git(repository.folder, "cat-file", "commit", sha).partition(b"\n\n")
    lines = [line.split(b" ", 1) for line in head.decode(errors="replace").encode().split(b"\n")]
    return CommitHead(
        tree=next(value.decode() for name, value in lines if name == b"tree"),
        parents=tuple(value.decode() for name, value in lines if name == b"parent"),
        message=message.decode(errors="replace"),
    )


def read_folders(repository: Repository, commit: str | None, folders: Iterable[str]) -> Folders:
    """The entries of each of `folders` (`""` is the root). Of files, the sizes are not read."""
    wanted = sorted(folders)
    if commit is None:
        return {folder: {} for folder in wanted}
    questions = "".join(f"{commit}:{folder}\n" for folder in wanted)
    answer = git(repository.folder, "cat-file", "--batch", stdin=questions.encode())
    found: dict[str, dict[str, Entry]] = {}
    start = 0
    for folder in wanted:
        end = answer.index(b"\n", start)
        fields = answer[start:end].rsplit(b" ", 2)
        start = end + 1
        found[folder] = {}
        if len(fields) == 3 and fields[2].isdigit():
            size = int(fields[2])
            if fields[1] == b"tree":
                entries = _parse_tree_object(answer[start : start + size], folder)
                found[folder] = {entry.path.rpartition("/")[2]: entry for entry in entries}
            start += size + 1
    return found


def _parse_tree_object(content: bytes, folder: str) -> Iterator[Entry]:
    """https://git-scm.com/book/en/v2/Git-Internals-Git-Objects#_tree_objects"""
    prefix = f"{folder}/" if folder else ""
    start = 0
    while start < len(content):
        name_end = content.index(b"\0", start)
        mode, _, name = content[start:name_end].partition(b" ")
        start = name_end + 1 + _SHA_BYTES
        yield Entry(
            type="directory" if mode == b"40000" else "file",
            path=prefix + name.decode(errors="replace"),
            oid=content[name_end + 1 : start].hex(),
        )


def list_paths(repository: Repository, commit: str) -> list[str]:
    """The path of every file, with nothing else that `list_tree` would have to look up."""
    output = git(repository.folder, "ls-tree", "-r", "-z", "--name-only", commit)
    return output.decode(errors="replace").split("\0")[:-1]


def changed_files(repository: Repository, before: str | None, after: str) -> list[Entry]:
    """The files of the commit `after` that `before` does not have, or has with another content."""
    output = git(
        repository.folder,
        *("diff-tree", "-r", "-z", "--no-renames", "--diff-filter=AMT"),
        before or _EMPTY_TREE,
        after,
    )
    fields = output.decode(errors="replace").split("\0")
    # Each file is two fields: ":<mode> <mode> <sha> <sha> <letter>", and the path.
    facts = [field.split(" ") for field in fields[:-1:2]]
    paths = fields[1::2]
    files = [
        (path, fact[3])
        for fact, path in zip(facts, paths, strict=False)
        if fact[1] in ("100644", "100755")
    ]
    sizes = _look_up(repository, [oid for _, oid in files])
    return [
        Entry(type="file", path=path, oid=oid, size_bytes=found[2] if found else 0)
        for (path, oid), found in zip(files, sizes, strict=True)
    ]


def list_commits(
    repository: Repository, commit: str, *, skip: int, limit: int, without: str | None = None
) -> list[Commit]:
    """Newest first; those that `without` leads to are left out."""
    window = (f"--skip={skip}", f"--max-count={limit}")
    others = [] if without is None else [f"^{without}"]
    return _parse_commits(
        git(repository.folder, "log", *_AS_RECORDS, *window, commit, *others, "--")
    )


def read_commits(repository: Repository, shas: Sequence[str]) -> Mapping[str, Commit]:
    """Each of the commits by its sha."""
    if not shas:
        return {}
    output = git(
        repository.folder,
        *("log", *_AS_RECORDS, "--no-walk=unsorted", "--stdin"),
        stdin="".join(f"{sha}\n" for sha in shas).encode(),
    )
    return {commit.sha: commit for commit in _parse_commits(output)}


def _parse_commits(output: bytes) -> list[Commit]:
    records = output.decode(errors="replace").split("\0") if output else []
    commits = []
    for record in records:
        if not record.strip():
            continue
        sha, author, seconds, title, message = record.split("\n", 4)
        commits.append(
            Commit(
                sha=sha,
                author=author,
                committed_at=min(int(seconds or 0), _LATEST_SECONDS),
                title=title,
                message=message.strip("\n"),
            )
        )
    return commits


def peeled_refs(repository: Repository, prefix: str) -> list[tuple[str, str]]:
    """(name below `prefix`, the commit it leads to), for `refs/heads/` or `refs/tags/`. A tag may
    name a file or a folder: such a tag is left out, because a client takes it for a commit."""
    output = git(
        repository.folder,
        "for-each-ref",
        "--format=%(refname) %(objectname) %(objecttype) %(*objectname) %(*objecttype)",
        prefix,
    )
    found = []
    for line in lines_of(output):
        ref, sha, type, peeled, peeled_type = line.split(" ")
        if (peeled_type or type) not in ("blob", "tree"):
            found.append((ref.removeprefix(prefix), peeled or sha))
    return found


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


def _odd_entries(repository: Repository, commit: str, paths: Sequence[str]) -> list[Entry]:
    """Those of `paths` that exist. For paths with control characters: a line feed would end the
    line that `_look_up` writes."""
    asked = {path for path in paths if len(path.encode()) <= _PATH_MAX_BYTES}
    if not asked:
        return []
    output = git(
        repository.folder,
        *("ls-tree", "-z", "-l", "-t", commit, "--", *asked),
        extra={"GIT_LITERAL_PATHSPECS": "1"},
    )
    return [entry for entry in _parse_tree(output, "") if entry.path in asked]


def _no_file(repository: Repository, revision: str, path: str, commit: str) -> EntryNotFound:
    return EntryNotFound(
        f"The {repository.name} has no file {path!r} at {revision}.", commit=commit
    )


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
    for line in lines_of(output):
        fields = line.split(" ")
        # "<expression> missing" and "<expression> ambiguous" are what else git says.
        if len(fields) == 3 and SHA.fullmatch(fields[0]) and fields[2].isdigit():
            found.append((fields[0], fields[1], int(fields[2])))
        else:
            found.append(None)
    return found


def _parse_tree(output: bytes, prefix: str) -> Iterator[Entry]:
    """Without submodules, and without names that are not UTF-8: no client could ask for them, and
    a client that downloads what is listed would fail."""
    for record in output.split(b"\0"):
        facts, _, name = record.partition(b"\t")
        try:
            path = name.decode()
        except UnicodeDecodeError:
            continue
        if not path:
            continue
        _, type, oid, size = facts.decode().split()
        if type == "blob":
            yield Entry(type="file", path=prefix + path, oid=oid, size_bytes=int(size))
        elif type == "tree":
            yield Entry(type="directory", path=prefix + path, oid=oid)
