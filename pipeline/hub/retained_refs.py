"""Keeps commits that are on no branch any more, because a release may name them. Each gets a ref
`refs/keep/<sha>`; without a ref, `git gc` would remove it.

No client sees these refs. A client fetches such a commit by its sha.
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
    """Keeps the commit that a ref had at the last event, if the same ref does not lead to it any
    more. `refs` has the present sha of each ref.

    Called before the event is stored. If the hub is killed in between, the next comparison finds
    the same change and keeps the commit.
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
                # The commit is missing, because of a purge or a damaged disk. This is no reason to
                # refuse the present push.
                logger.error(
                    "the former commit of %s in %s is not kept: %s", ref, repository.name, error
                )


def keep(repository: Repository, sha: str) -> None:
    """Adds the ref that keeps `sha`. Raises HubError if the repository has no object `sha`."""
    git(repository.folder, "update-ref", f"{KEEP_PREFIX}{sha}", sha)


def delete_refs(repository: Repository, refs: Iterable[str]) -> None:
    """Deletes all of these refs, or none if one fails. A ref that does not exist is no failure."""
    commands = "".join(f"delete {ref}\n" for ref in refs)
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())


def release_unneeded(
    repository: Repository, database: Database, needed: Collection[str]
) -> list[str]:
    """Deletes the keeping refs of commits that neither `needed` nor a stored event names. Returns
    the shas of these commits.

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
    # A named commit may be kept only because an unneeded commit leads to it. It gets its own ref.
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
    logger.info("%s: %d commits are not kept any more", repository.name, len(unneeded))
    return unneeded


def _kept(repository: Repository) -> list[str]:
    lines = git(repository.folder, "for-each-ref", "--format=%(refname)", KEEP_PREFIX)
    return [ref.removeprefix(KEEP_PREFIX) for ref in lines_of(lines)]


def _leads_to(repository: Repository, descendant: str, ancestor: str) -> bool:
    try:
        git(repository.folder, "merge-base", "--is-ancestor", ancestor, descendant)
    except HubError:  # git says no, or one of the two is a tag of something else than a commit
        return False
    return True
