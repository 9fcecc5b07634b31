"""Tells commits that jobs made from all others, so that a job cannot set itself off for ever.

The mark is the committer that the runner gives to git in a job's environment, or, for commits that
are made by other means, the trailer `Pipeline-Job: <job id>` at the end of the message.
"""

import logging
from collections.abc import Iterable

from jobs.environment import COMMITTER_DOMAIN
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import git, lines_of
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository

logger = logging.getLogger(__name__)

TRAILER = "Pipeline-Job"


def made_by_jobs(repository: Repository, change: RefChange, known: Iterable[str]) -> bool:
    """Whether `change` brought commits beyond the `known` ones, and jobs made all of them."""
    if change.new_sha is None:
        return False
    revisions = "".join(f"{sha}\n" for sha in (change.new_sha, *(f"^{sha}" for sha in known)))
    try:
        lines = git(
            repository.folder,
            "log",
            "--ignore-missing",
            f"--format=%ce%x09%(trailers:key={TRAILER},valueonly,unfold,separator=%x2C)",
            "--stdin",
            stdin=revisions.encode(),
        )
    except HubError as error:
        # A tag of a file, or a damaged repository: what cannot be told apart fires.
        logger.warning("who made %s of %s is unknown: %s", change.ref, repository.name, error)
        return False
    commits = lines_of(lines)
    return bool(commits) and all(_is_marked(commit) for commit in commits)


def _is_marked(commit: str) -> bool:
    committer, _, trailer = commit.partition("\t")
    return committer.endswith(f"@{COMMITTER_DOMAIN}") or bool(trailer.strip())
