"""Keeps the repositories small: stops keeping what nothing needs, and collects git's garbage."""

from collections.abc import Callable, Collection

from pipeline.hub.database import Database
from pipeline.hub.git_process import git
from pipeline.hub.repositories import Repositories, Repository
from pipeline.hub.retained_refs import release_unneeded

NeededCommits = Callable[[], Collection[str]]


def collect_garbage(
    repository: Repository, database: Database, needed_commits: NeededCommits | None
) -> int:
    """Remove the objects that no ref leads to; returns how many commits are kept no longer.

    The caller holds the repository's lock, because objects of a push that is under way have no ref
    yet.
    """
    num_released = 0
    if needed_commits is not None:
        num_released = len(release_unneeded(repository, database, needed_commits()))
    git(repository.folder, "gc", "--quiet", "--prune=now")
    return num_released


async def release_all_unneeded(
    repositories: Repositories, database: Database, needed_commits: NeededCommits | None
) -> None:
    if needed_commits is not None:
        await repositories.for_each(
            database, lambda repository: release_unneeded(repository, database, needed_commits())
        )
