"""Keeps the repositories small: stops keeping what nothing needs, and collects git's garbage."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pipeline.hub import xet_store
from pipeline.hub.blobs import all_pointers
from pipeline.hub.database import Database
from pipeline.hub.git_process import git
from pipeline.hub.large_files import GRACE_SECONDS, LargeFiles
from pipeline.hub.repositories import Repositories, Repository
from pipeline.hub.retained_refs import release_unneeded

NeededCommits = Callable[[], Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    num_commits: int
    """Which are kept no longer."""
    large_bytes: int
    """Of large files that were removed."""


def collect_garbage(
    repository: Repository,
    database: Database,
    needed_commits: NeededCommits | None,
    *,
    grace_seconds: float = GRACE_SECONDS,
) -> Collected:
    """Remove the objects that no ref leads to, and the large files that no commit names any more.

    grace_seconds: how long a large file is kept whose commit has not come. What `hf_xet` has sent
    is removed too if it was quiet for as long; the client sends it again when it needs it.

    The caller holds the repository's lock, because objects of a push that is under way have no ref
    yet.
    """
    num_commits = 0
    if needed_commits is not None:
        num_commits = len(release_unneeded(repository, database, needed_commits()))
    git(repository.folder, "gc", "--quiet", "--prune=now")
    named = {pointer.oid for pointer in all_pointers(repository)}
    files = LargeFiles(repository.folder)
    large_bytes = files.remove_others(named, grace_seconds=grace_seconds)
    xet_store.empty(repository.folder, grace_seconds=grace_seconds)
    return Collected(num_commits=num_commits, large_bytes=large_bytes)


async def release_all_unneeded(
    repositories: Repositories, database: Database, needed_commits: NeededCommits | None
) -> None:
    if needed_commits is not None:
        await repositories.for_each(
            database, lambda repository: release_unneeded(repository, database, needed_commits())
        )
