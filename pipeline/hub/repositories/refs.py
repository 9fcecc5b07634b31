"""The refs of a repository: where git has them now, where they were at the last event, and the refs
that keep commits.

A commit that is on no branch any more gets a ref `refs/keep/<sha>`, because a release may name it.
Without a ref, `git gc` would remove it. No client sees these refs. A client fetches such a commit
by its sha.
"""

import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.errors import DiskFull, HubError
from pipeline.hub.git.process import KEEP_PREFIX, SEEN_PREFIXES, git, lines_of
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.store import Repository

logger = logging.getLogger(__name__)

_DAMAGED = re.compile(r"ignoring broken ref (.+)$")


@dataclass(frozen=True, kw_only=True)
class RefChange:
    """`old_sha` is None for a new ref, and `new_sha` is None for a deleted ref."""

    ref: str
    old_sha: str | None
    new_sha: str | None


def read_refs(repository: Repository) -> Mapping[str, str]:
    """The sha of each branch, tag and pull request, by the ref's full name (`refs/heads/main`).

    Raises HubError if git cannot read a ref. Git leaves this ref out of its list, so the hub
    would otherwise record that it was deleted.
    """
    complaints: list[str] = []
    lines = git(
        repository.folder,
        *("for-each-ref", "--format=%(objectname) %(refname)", *SEEN_PREFIXES),
        complaints=complaints,
    )
    damaged = [found[1] for line in complaints if (found := _DAMAGED.search(line))]
    if damaged:
        raise HubError(
            f"Git cannot read {', '.join(damaged)} of the {repository.name}: restore the files "
            "of these refs from a backup."
        )
    pairs = (line.split(" ", 1) for line in lines_of(lines))
    return {ref: sha for sha, ref in pairs}


def peeled_refs(repository: Repository, prefix: str) -> list[tuple[str, str]]:
    """For each ref below `prefix`, its name without `prefix` and the sha of its commit. A tag of a
    file or a folder is left out, because a client would take the file or folder for a commit."""
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


def known_refs(connection: Connection, repository: Repository) -> dict[str, str]:
    """The sha of each ref at its last event, by the ref's full name."""
    table = schema.refs
    rows = connection.execute(
        select(table.c.ref, table.c.sha).where(table.c.repository_id == repository.id)
    )
    return {row.ref: row.sha for row in rows}


def ref_changes(known: Mapping[str, str], now: Mapping[str, str]) -> Iterator[RefChange]:
    # The default branch comes first, for receivers that read only the first ref.
    for ref in sorted(known.keys() | now.keys(), key=lambda ref: (ref != DEFAULT_BRANCH, ref)):
        old, new = known.get(ref), now.get(ref)
        if old != new:
            yield RefChange(ref=ref, old_sha=old, new_sha=new)


def remember(connection: Connection, repository: Repository, changes: Sequence[RefChange]) -> None:
    """Stores the new shas of the changed refs. After the next push, the hub compares the refs with
    these shas."""
    table = schema.refs
    gone = delete(table).where(
        table.c.repository_id == repository.id, table.c.ref == bindparam("moved")
    )
    connection.execute(gone, [{"moved": change.ref} for change in changes])
    rows = [
        {"repository_id": repository.id, "ref": change.ref, "sha": change.new_sha}
        for change in changes
        if change.new_sha is not None
    ]
    if rows:
        connection.execute(insert(table), rows)


def retain_unreachable(repository: Repository, database: Database, refs: Mapping[str, str]) -> None:
    """Keeps the commit that a ref had at the last event, if no ref leads to it any more. `refs` has
    the present sha of each ref.

    The caller stores the event only after this. If the hub is killed before it has kept the commit,
    the next comparison finds the same change and keeps the commit.
    """
    with database.read() as connection:
        known = known_refs(connection, repository)
    moved = {ref: sha for ref, sha in known.items() if refs.get(ref) != sha}
    if not moved:
        return
    revisions = [*moved.values(), *(f"^{sha}" for sha in refs.values())]
    left_behind = set(moved.values())
    try:
        lost = git(
            repository.folder,
            *("rev-list", "--ignore-missing", "--stdin"),
            stdin="\n".join(revisions).encode(),
        )
        left_behind.intersection_update(lost.decode().split())
    except DiskFull:
        raise
    except HubError as error:
        # A commit in the middle of the history is lost. The present push must get its event all the
        # same, so keep every former commit.
        logger.error("%s: git cannot read the whole history: %s", repository.name, error)
    # `rev-list` does not print the object of an annotated tag, only its commit.
    left_behind.update(sha for ref, sha in moved.items() if ref.startswith("refs/tags/"))
    if left_behind:
        keep(repository, _present(repository, left_behind))


def _present(repository: Repository, shas: Collection[str]) -> list[str]:
    """The objects of `shas` that the repository has. The others are missing because of a purge or a
    damaged disk, which is no reason to refuse the present push."""
    answer = git(repository.folder, "cat-file", "--batch-check", stdin="\n".join(shas).encode())
    found = [line.split(" ") for line in lines_of(answer)]
    for sha, kind, *_ in found:
        if kind == "missing":
            logger.error("%s does not keep %s: the object is missing", repository.name, sha)
    return [sha for sha, kind, *_ in found if kind != "missing"]


def keep(repository: Repository, shas: Iterable[str]) -> None:
    """Adds the refs that keep `shas`. Raises HubError if the repository lacks one of them, and then
    adds no ref."""
    commands = "".join(f"update {KEEP_PREFIX}{sha} {sha}\n" for sha in shas)
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())


def delete_refs(repository: Repository, refs: Iterable[str]) -> None:
    """Deletes the `refs`, or none of them if git refuses one. A missing ref is not an error."""
    commands = "".join(f"delete {ref}\n" for ref in refs)
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())


def release_unneeded(
    repository: Repository, database: Database, needed: Collection[str]
) -> list[str]:
    """Deletes each ref `refs/keep/<sha>` whose commit is neither in `needed` nor in a stored event.
    Returns the shas of these commits.

    The caller holds the repository's lock. The next `git gc` removes the objects of the commits.
    """
    events = schema.events.c
    named = set(needed)
    with database.read() as connection:
        rows = select(events.updated_refs).where(events.repository_id == repository.id)
        for changes in connection.execute(rows).scalars():
            named.update(
                sha for each in changes for sha in (each["old_sha"], each["new_sha"]) if sha
            )
    kept = _kept(repository)
    unneeded = [sha for sha in kept if sha not in named]
    if not unneeded:
        return []
    # If only an unneeded commit leads to a named commit, the named commit now gets its own ref.
    revisions = [sha if sha not in named else f"^{sha}" for sha in kept]
    lost = git(
        repository.folder,
        *("rev-list", "--ignore-missing", "--stdin", "--not"),
        *(f"--glob={prefix}*" for prefix in SEEN_PREFIXES),
        stdin="\n".join(revisions).encode(),
    )
    keep(repository, named.intersection(lost.decode().split()))
    delete_refs(repository, [f"{KEEP_PREFIX}{sha}" for sha in unneeded])
    logger.info("%s: %d commits are not kept any more", repository.name, len(unneeded))
    return unneeded


def _kept(repository: Repository) -> list[str]:
    lines = git(repository.folder, "for-each-ref", "--format=%(refname)", KEEP_PREFIX)
    return [ref.removeprefix(KEEP_PREFIX) for ref in lines_of(lines)]
