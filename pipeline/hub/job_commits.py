"""Finds the commits that jobs made, so that the commit of a job does not start the job again.

A commit is a job's if its committer has the mail domain that the runner sets for git in a job's
environment. A commit that is made without this environment can have the trailer
`Pipeline-Job: <job id>` at the end of its message instead.
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
    """The changes that brought new commits, if jobs made all of these commits. `known` are shas
    that the refs had before: what they lead to is not new."""
    news = [change.new_sha for change in changes if change.new_sha is not None]
    try:
        marks = _marks(repository, news, known)
        if not any(marks):
            return []
        if len(news) == 1:
            return [one for one in changes if one.new_sha is not None and all(marks)]
        # Look at each change by itself, because another one may bring commits of people.
        return [
            one
            for one in changes
            if one.new_sha is not None
            and (own := _marks(repository, [one.new_sha], known))
            and all(own)
        ]
    except HubError as error:
        # A tag of a file, or a damaged repository. Without an answer, webhooks get the changes.
        logger.warning(
            "cannot find out who made the new commits of %s, so webhooks get them: %s",
            *(repository.name, error),
        )
        return []


def _marks(repository: Repository, shas: Sequence[str], known: Collection[str]) -> list[bool]:
    """Whether a job made it, for each commit that `shas` lead to and `known` do not lead to."""
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
