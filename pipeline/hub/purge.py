"""Removes a commit that was pushed by mistake: its refs, its objects, its large files, and the
commits after it.

Every step may be repeated, so a purge that was killed is begun again and comes to its end.
"""

from collections.abc import Mapping
from typing import TypedDict

from pipeline.hub import xet_store
from pipeline.hub.blobs import all_pointers, reachable_pointers
from pipeline.hub.errors import BadRequest, Conflict, HubError
from pipeline.hub.git_process import SEEN_PREFIXES, git, lines_of
from pipeline.hub.large_files import LargeFiles
from pipeline.hub.names import SHA
from pipeline.hub.repositories import Repository
from pipeline.hub.retained_refs import delete_refs, keep

MAX_NAMED = 5


class Purge(TypedDict):
    commits: list[str]
    """The commit, and those after it: they contain it, and so they go with it."""
    refs: list[str]
    """The hub's own refs that lead to it."""
    is_there: bool
    """False where the repository no longer has the commit."""


def plan_purge(repository: Repository, sha: str) -> Purge:
    """What a purge would remove. Raises BadRequest for what is no sha of a commit, and Conflict
    where a branch or a tag leads to the commit."""
    if not SHA.fullmatch(sha):
        raise BadRequest(f"{sha!r} is no commit: give all 40 characters of its sha.")
    kind = _kind(repository, sha)
    if kind is None:
        return Purge(commits=[sha], refs=[], is_there=False)
    if kind != "commit":
        raise BadRequest(f"{sha} is a {kind}: give the sha of the commit that brought it.")
    leading = _refs_to(repository, sha)
    pushed = [ref for ref in leading if ref.startswith(SEEN_PREFIXES)]
    if pushed:
        more = f" and {len(pushed) - MAX_NAMED} more" if len(pushed) > MAX_NAMED else ""
        raise Conflict(
            f"{', '.join(pushed[:MAX_NAMED])}{more} of the {repository.name} still "
            f"{'leads' if len(pushed) == 1 else 'lead'} to {sha}: first take the commit out of it "
            "(git push --force), or delete it."
        )
    commits = [sha]
    if leading:
        # Every commit on the way from these refs down to the purged one.
        between = "\n".join([*leading.values(), f"^{sha}"])
        path = git(
            repository.folder, "rev-list", "--ancestry-path", "--stdin", stdin=between.encode()
        )
        commits += path.decode().split()
    return Purge(commits=commits, refs=list(leading), is_there=True)


def purge(repository: Repository, sha: str) -> Purge:
    """The caller holds the repository's lock. Raises what `plan_purge` raises, and HubError if the
    commit is still there afterwards."""
    planned = plan_purge(repository, sha)
    _keep_parents(repository, planned)
    delete_refs(repository, planned["refs"])
    # While their pointers are still there, so that a purge that is killed finds them again.
    named = {pointer.oid for pointer in reachable_pointers(repository)}
    LargeFiles(repository.folder).remove(
        pointer.oid for pointer in all_pointers(repository) if pointer.oid not in named
    )
    xet_store.empty(repository.folder, grace_seconds=0)
    # A killed push leaves such a file, and git would keep the pack beside it for ever. No push runs
    # now.
    for mark in repository.folder.glob("objects/pack/*.keep"):
        mark.unlink()
    git(repository.folder, "reflog", "expire", "--expire=now", "--all")
    git(repository.folder, "repack", "-a", "-d", "-q")
    git(repository.folder, "prune", "--expire=now")
    if _kind(repository, sha) is not None:
        raise HubError(
            f"{sha} is still in {repository.folder}: something that is no ref leads to it, such as "
            "objects/info/alternates, or HEAD."
        )
    return planned


def _keep_parents(repository: Repository, planned: Purge) -> None:
    """What lay before the purged commit was kept by the same refs, and stays."""
    if not planned["is_there"]:
        return
    doomed = set(planned["commits"])
    commits = "\n".join(planned["commits"]).encode()
    lines = git(repository.folder, "rev-list", "--no-walk", "--parents", "--stdin", stdin=commits)
    parents = {parent for line in lines_of(lines) for parent in line.split()[1:]} - doomed
    for parent in sorted(parents):
        leading = set(_refs_to(repository, parent)) - set(planned["refs"])
        if not leading:
            keep(repository, parent)


def _refs_to(repository: Repository, sha: str) -> Mapping[str, str]:
    """Every ref from which the commit is reached → what it names."""
    lines = git(
        repository.folder,
        "for-each-ref",
        f"--contains={sha}",
        "--format=%(refname) %(objectname)",
    )
    # Neither a ref nor a sha has a blank.
    return dict(line.split(" ") for line in lines_of(lines))


def _kind(repository: Repository, sha: str) -> str | None:
    """The type of the object; None where there is no such object."""
    answer = git(
        repository.folder, "cat-file", "--batch-check=%(objecttype)", stdin=f"{sha}\n".encode()
    )
    kind = answer.decode().split()[-1]
    return None if kind == "missing" else kind
