"""Tells commits that jobs made from all others, so that a job cannot set itself off for ever.

The mark is the committer that the runner gives to git in a job's environment, or, for commits that
are made by other means, the trailer `Pipeline-Job: <job id>` at the end of the message.
"""

import logging
from collections.abc import Collection, Sequence

from jobs.environment import COMMITTER_DOMAIN
from pipeline.hub.errors import HubError
from pipeline.hub.git_process import git, lines_of
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository

logger = logging.getLogger(__name__)

TRAILER = "Pipeline-Job"


def of_jobs(
    repository: Repository, changes: Sequence[RefChange], known: Collection[str]
) -> list[RefChange]:
    """Those of `changes` that brought commits beyond the `known` ones, all of them made by jobs."""
    news = [change.new_sha for change in changes if change.new_sha is not None]
    try:
        marks = _marks(repository, news, known)
        if not any(marks):
            return []
        if len(news) == 1:
            return [one for one in changes if one.new_sha is not None and all(marks)]
        # Each change by itself: one of them may bring commits of people.
        return [
            one
            for one in changes
            if one.new_sha is not None
            and (own := _marks(repository, [one.new_sha], known))
            and all(own)
        ]
    except HubError as error:
        # A tag of a file, or a damaged repository: what cannot be told apart fires.
        logger.warning("who made the commits of %s is unknown: %s", repository.name, error)
        return []


def _marks(repository: Repository, shas: Sequence[str], known: Collection[str]) -> list[bool]:
    """For each commit that `shas` lead to and `known` do not: whether a job made it."""
    revisions = "".join(f"{sha}\n" for sha in (*shas, *(f"^{sha}" for sha in known)))
    lines = git(
        repository.folder,
        "log",
        "--ignore-missing",
        f"--format=%ce%x09%(trailers:key={TRAILER},valueonly,unfold,separator=%x2C)",
        "--stdin",
        stdin=revisions.encode(),
    )
    return [_is_marked(commit) for commit in lines_of(lines)]


def _is_marked(commit: str) -> bool:
    committer, _, trailer = commit.partition("\t")
    return committer.endswith(f"@{COMMITTER_DOMAIN}") or bool(trailer.strip())
