"""Refs that keep commits which left every branch: releases name them, and `git gc` would drop them.

No client sees these refs; the commits are fetched by their sha.
"""

from collections.abc import Mapping

from sqlalchemy import select

from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import KEEP_PREFIX, git
from pipeline.hub.repositories import Repository


def keep_left_behind(repository: Repository, database: Database, refs: Mapping[str, str]) -> None:
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
            git(repository.folder, "update-ref", f"{KEEP_PREFIX}{sha}", sha)


def _leads_to(repository: Repository, descendant: str, ancestor: str) -> bool:
    try:
        git(repository.folder, "merge-base", "--is-ancestor", ancestor, descendant)
    except HubError:  # "no", and tags of what is no commit
        return False
    return True
