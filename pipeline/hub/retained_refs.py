"""Refs that keep commits which left every branch: releases name them, and `git gc` would drop them.

No client sees these refs; the commits are fetched by their sha.
"""

import logging
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import select

from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import KEEP_PREFIX, SEEN_PREFIXES, git, lines_of
from pipeline.hub.repositories import Repository

logger = logging.getLogger(__name__)


def retain_unreachable(repository: Repository, database: Database, refs: Mapping[str, str]) -> None:
    """Keep what each ref named at the last event, where `refs` does not lead back to it.

    Called before the change is stored: after a kill it is found again then.
    """
    table = schema.refs
    with database.read() as connection:
        known = connection.execute(
            select(table.c.ref, table.c.sha).where(table.c.repository_id == repository.id)
        ).all()
    for ref, sha in known:
        now = refs.get(ref)
        if now != sha and (now is None or not _leads_to(repository, now, sha)):
            try:
                keep(repository, sha)
            except HubError as error:
                # Gone, by a purge or a damaged disk: no reason to refuse what is pushed now.
                logger.error(
                    "what %s of %s left behind is not kept: %s", ref, repository.name, error
                )


def keep(repository: Repository, sha: str) -> None:
    """Raises HubError if the repository has no such object."""
    git(repository.folder, "update-ref", f"{KEEP_PREFIX}{sha}", sha)


def delete_refs(repository: Repository, refs: Iterable[str]) -> None:
    """All of them or none; a ref that is not there is deleted already."""
    commands = "".join(f"delete {ref}\n" for ref in refs)
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())


def release_unneeded(
    repository: Repository, database: Database, needed: Collection[str]
) -> list[str]:
    """Stop keeping commits that are neither `needed` nor named by a stored event; returns them.

    The caller holds the repository's lock. Git removes their objects at its next collection.
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
    # What only these lead to, but is named: it is kept by a ref of its own from now on.
    revisions = [sha if sha not in named else f"^{sha}" for sha in kept]
    lost = git(
        repository.folder,
        *("rev-list", "--ignore-missing", "--stdin", "--not"),
        *(f"--glob={prefix}*" for prefix in SEEN_PREFIXES),
        stdin="\n".join(revisions).encode(),
    )
    for sha in named.intersection(lost.decode().split()):
        keep(repository, sha)
    delete_refs(repository, [f"{KEEP_PREFIX}{sha}" for sha in unneeded])
    logger.info("%s: %d commits are kept no longer", repository.name, len(unneeded))
    return unneeded


def _kept(repository: Repository) -> list[str]:
    lines = git(repository.folder, "for-each-ref", "--format=%(refname)", KEEP_PREFIX)
    return [ref.removeprefix(KEEP_PREFIX) for ref in lines_of(lines)]


def _leads_to(repository: Repository, descendant: str, ancestor: str) -> bool:
    try:
        git(repository.folder, "merge-base", "--is-ancestor", ancestor, descendant)
    except HubError:  # "no", and tags of what is no commit
        return False
    return True
