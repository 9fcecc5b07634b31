"""Refs that keep commits which left every branch: releases name them, and `git gc` would drop them.

No client sees these refs; the commits are fetched by their sha.
"""

import logging
from collections.abc import Mapping

from sqlalchemy import select

from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import KEEP_PREFIX, git
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
            _keep(repository, ref, sha)


def _keep(repository: Repository, ref: str, sha: str) -> None:
    try:
        git(repository.folder, "update-ref", f"{KEEP_PREFIX}{sha}", sha)
    except HubError as error:
        # It may be gone, by hand or by a damaged disk: no reason to refuse what is pushed now.
        logger.error("what %s of %s left behind is not kept: %s", ref, repository.name, error)


def _leads_to(repository: Repository, descendant: str, ancestor: str) -> bool:
    try:
        git(repository.folder, "merge-base", "--is-ancestor", ancestor, descendant)
    except HubError:  # "no", and tags of what is no commit
        return False
    return True
