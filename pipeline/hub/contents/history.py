"""Finds the commit that a revision names, and the commit that last changed a path. Reads commits.
Changes nothing in the repository."""

import re
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from pipeline.hub.errors import RevisionNotFound
from pipeline.hub.git.process import git, output_of
from pipeline.hub.repositories.names import SHA, is_ref_name, parents_of
from pipeline.hub.repositories.objects import look_up
from pipeline.hub.repositories.refs import peeled_refs
from pipeline.hub.repositories.store import Repository

MAX_COMMITS = 50_000
MAX_SECONDS = 10.0
"""`last_commits` stops after this many commits or seconds. A path for which it has found no change
until then is missing in its result."""
_CHUNK_BYTES = 64 * 1024
_ABBREVIATED = re.compile(r"[0-9a-f]{7,39}")
# 9999-12-31, the latest date that Python can represent. A commit may have a later date.
_LATEST_SECONDS = 253402300799
# Each field ends with a line feed, because neither an author's name nor a title can contain one.
_AS_RECORDS = ("-z", "--encoding=UTF-8", "--format=%H%n%an%n%ct%n%s%n%b")


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
    """The fields of a commit object."""

    tree: str
    parents: tuple[str, ...]
    message: str


def resolve_revision(repository: Repository, revision: str) -> str:
    """The sha of the commit that `revision` names: a branch, a tag, a full ref, or a sha with 7
    digits or more. A commit is found by its sha even if no ref leads to it any more.

    Raises RevisionNotFound.
    """
    for found in look_up(repository, [f"{name}^{{commit}}" for name in _candidates(revision)]):
        if found is not None:
            return found[0]
    branches = [name for name, _ in peeled_refs(repository, "refs/heads/")]
    if not branches:
        raise RevisionNotFound(
            f"The {repository.name} has no commit yet: push one with "
            f"`git push <this hub>/{repository.name.path} HEAD:main`."
        )
    raise RevisionNotFound(
        f"The {repository.name} has no branch, tag or commit {revision!r}: choose one of its "
        f"branches, such as {', '.join(branches[:10])}."
    )


def _candidates(revision: str) -> list[str]:
    if not is_ref_name(revision):
        return []
    if SHA.fullmatch(revision) or revision == "HEAD" or revision.startswith("refs/"):
        return [revision]
    names = [f"refs/heads/{revision}", f"refs/tags/{revision}"]
    return [*names, revision] if _ABBREVIATED.fullmatch(revision) else names


def read_commit(repository: Repository, sha: str) -> CommitHead:
    told = git(repository.folder, "log", "-z", "--max-count=1", "--format=%T%n%P%n%B", sha, "--")
    tree, parents, message = told.decode(errors="replace").removesuffix("\0").split("\n", 2)
    return CommitHead(tree=tree, parents=tuple(parents.split()), message=message)


def list_commits(
    repository: Repository, commit: str, *, skip: int, limit: int, without: str | None = None
) -> list[Commit]:
    """The commits that `commit` leads to and `without` does not lead to, newest first."""
    others = [] if without is None else [f"^{without}"]
    return _log(repository, f"--skip={skip}", f"--max-count={limit}", commit, *others, "--")


def _log(repository: Repository, *arguments: str, stdin: bytes = b"") -> list[Commit]:
    output = git(repository.folder, "log", *_AS_RECORDS, *arguments, stdin=stdin)
    commits = []
    for record in output.decode(errors="replace").split("\0"):
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


def last_commits(repository: Repository, commit: str, paths: Iterable[str]) -> Mapping[str, Commit]:
    """For each file or folder in `paths`, the last commit up to `commit` that changed it. This
    follows only the first parent of each commit. So if a merge brought the change, the merge itself
    counts as the commit that made it."""
    wanted = set(paths)
    found: dict[str, str] = {}
    deadline = time.monotonic() + MAX_SECONDS
    sha = ""
    # Git prints each name after the commit that changed it. No name begins with `//`.
    with output_of(
        repository.folder,
        *("log", "--first-parent", "-m", "-z", "--name-only", "--no-renames"),
        *(f"--max-count={MAX_COMMITS}", "--format=//%H", commit, "--"),
    ) as output:
        for field in _fields(output):
            if not wanted or time.monotonic() > deadline:
                break
            if field.startswith("//"):
                sha = field.removeprefix("//")
            for changed in wanted.intersection((field, *parents_of(field))):
                wanted.discard(changed)
                found[changed] = sha
    if not found:
        return {}
    listed = "".join(f"{sha}\n" for sha in set(found.values())).encode()
    commits = _log(repository, "--no-walk=unsorted", "--stdin", stdin=listed)
    by_sha = {commit.sha: commit for commit in commits}
    return {path: by_sha[sha] for path, sha in found.items()}


def _fields(output: IO[bytes]) -> Iterator[str]:
    rest = b""
    while chunk := output.read(_CHUNK_BYTES):
        *fields, rest = (rest + chunk).split(b"\0")
        for field in fields:
            yield field.decode(errors="replace").lstrip("\n")
