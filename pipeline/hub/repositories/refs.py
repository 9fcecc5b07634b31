"""The refs of a repository: where git has them now, and where they were at the last event."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from pipeline.hub import schema
from pipeline.hub.errors import HubError
from pipeline.hub.git.process import SEEN_PREFIXES, git, lines_of
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.store import Repository

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
