"""Keeps the repositories small: removes commits and large files that nothing needs any more."""

from collections.abc import Callable, Collection
from dataclasses import dataclass

from pipeline.hub.database import Database
from pipeline.hub.git.process import git
from pipeline.hub.large_files import xet_store
from pipeline.hub.large_files.store import GRACE_SECONDS, LargeFiles
from pipeline.hub.repositories.objects import all_pointers
from pipeline.hub.repositories.refs import release_unneeded
from pipeline.hub.repositories.store import Repositories, Repository

NeededCommits = Callable[[], Collection[str]]


@dataclass(frozen=True, kw_only=True)
class Collected:
    num_commits: int
    """The number of commits that are not kept any more."""
    large_bytes: int
    """The total size of the large files that were removed."""


def collect_garbage(
    repository: Repository,
    database: Database,
    needed_commits: NeededCommits | None,
    *,
    grace_seconds: float = GRACE_SECONDS,
) -> Collected:
    """Removes the git objects that no ref leads to, and the large files that no commit names.

    A large file may come before its commit, so it stays for at least `grace_seconds`. The chunks
    that `hf_xet` has sent are removed if no upload began in the last `grace_seconds`. `hf_xet`
    sends them again when it needs them.

    The caller holds the repository's lock. Otherwise this would remove the objects of a push that
    is under way, because they have no ref yet.
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
    """Deletes, in every repository, the refs that keep commits which nothing needs (`refs.py`).
    Does nothing if `needed_commits` is None, because the needed commits are then not known."""
    if needed_commits is not None:
        await repositories.for_each(
            database, lambda repository: release_unneeded(repository, database, needed_commits())
        )
