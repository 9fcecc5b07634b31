"""Removes git objects and large files that nothing needs any more. Git itself never removes any."""

import contextlib
from collections.abc import Iterable, Iterator

from pipeline.hub.contents import all_objects, look_up, pointers_of
from pipeline.hub.git import KEEP_PREFIX, git, lines_of
from pipeline.hub.large_files import GRACE_SECONDS, LargeFiles
from pipeline.hub.repositories import Repository


def sweep(
    repository: Repository,
    needed: Iterable[str],
    *,
    grace_seconds: float = GRACE_SECONDS,
    new_files_stay: bool = True,
) -> int:
    """Removes the git objects that neither a ref nor a commit in `needed` leads to, and the large
    files that no remaining commit names. A large file may come before its commit, so it stays for
    at least `grace_seconds`. If `new_files_stay` is false, newer ones that a removed commit names
    go too. Returns how many bytes the large files had. The caller holds the repository's lock."""
    files = LargeFiles(repository.folder)
    with _kept(repository, needed):
        listed = git(repository.folder, "rev-list", "--all", "--objects", "--no-object-names")
        reachable = pointers_of(repository, look_up(repository, lines_of(listed)))
        named = {pointer.oid for pointer in reachable.values()}
        num_bytes = files.remove_others(named, grace_seconds=grace_seconds)
        if not new_files_stay:
            # Before their pointers. If the sweep is killed, the next one still finds the remaining
            # files by the pointers.
            present = pointers_of(repository, all_objects(repository)).values()
            files.remove({pointer.oid for pointer in present} - named)
        git(repository.folder, "gc", "--quiet", "--prune=now")
    return num_bytes


@contextlib.contextmanager
def _kept(repository: Repository, needed: Iterable[str]) -> Iterator[None]:
    """Within the block, a ref `refs/keep/<sha>` leads to each commit in `needed` that no other ref
    leads to. Ignores commits that the repository does not have."""
    _drop_kept(repository)  # from a killed sweep
    lines = git(
        repository.folder,
        *("rev-list", "--ignore-missing", "--parents", "--stdin", "--not", "--all"),
        stdin="".join(f"{sha}\n" for sha in needed).encode(),
    )
    lost = [line.split() for line in lines_of(lines)]
    # A commit that has another one after it needs no ref of its own.
    parents = {parent for _, *parents in lost for parent in parents}
    tips = "".join(f"update {KEEP_PREFIX}{sha} {sha}\n" for sha, *_ in lost if sha not in parents)
    git(repository.folder, "update-ref", "--stdin", stdin=tips.encode())
    try:
        yield
    finally:
        _drop_kept(repository)


def _drop_kept(repository: Repository) -> None:
    refs = git(repository.folder, "for-each-ref", "--format=delete %(refname)", KEEP_PREFIX)
    git(repository.folder, "update-ref", "--stdin", stdin=refs)
