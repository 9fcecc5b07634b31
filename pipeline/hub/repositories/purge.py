"""Removes a commit that was pushed by mistake, with its objects and its large files. Also removes
the later commits that contain it and that only these refs keep: the hub's own refs
(`refs/keep/…`), and the refs of pull requests that are merged or closed.

Every step may be repeated. So if a purge is killed, it can be started again.
"""

from collections.abc import Collection, Mapping
from typing import TypedDict

from pipeline.hub.errors import BadRequest, Conflict, HubError
from pipeline.hub.git.process import PUSHED_PREFIXES, git, lines_of
from pipeline.hub.large_files import xet_store
from pipeline.hub.large_files.store import LargeFiles
from pipeline.hub.repositories.names import SHA
from pipeline.hub.repositories.objects import all_pointers, reachable_pointers
from pipeline.hub.repositories.refs import delete_refs, keep
from pipeline.hub.repositories.store import Repository

MAX_NAMED = 5


class Purge(TypedDict):
    commits: list[str]
    """The shas of all commits that are removed: the given commit, and the kept commits after it,
    which contain it."""
    refs: list[str]
    """The refs that lead to the commit, and that are removed too."""
    is_there: bool
    """False if the repository does not have the commit (any more)."""


def plan_purge(repository: Repository, sha: str, open_refs: Collection[str]) -> Purge:
    """What a purge would remove. `open_refs` are the refs of the open pull requests. Nobody can
    push to the ref of another pull request, so a purge removes it.

    Raises BadRequest if `sha` is not the sha of a commit, and Conflict if a branch, a tag or an
    open pull request leads to the commit.
    """
    if not SHA.fullmatch(sha):
        raise BadRequest(f"{sha!r} is not the sha of a commit: give all 40 digits of its sha.")
    kind = _kind(repository, sha)
    if kind is None:
        return Purge(commits=[sha], refs=[], is_there=False)
    if kind != "commit":
        raise BadRequest(
            f"{sha} is a {kind}, not a commit: give the sha of the commit that brought it."
        )
    leading = _refs_to(repository, sha)
    pushed = [ref for ref in leading if ref.startswith(PUSHED_PREFIXES) or ref in open_refs]
    if pushed:
        more = f" and {len(pushed) - MAX_NAMED} more" if len(pushed) > MAX_NAMED else ""
        raise Conflict(
            f"{', '.join(pushed[:MAX_NAMED])}{more} of the {repository.name} still "
            f"{'leads' if len(pushed) == 1 else 'lead'} to {sha}: first remove the commit from "
            f"{'it' if len(pushed) == 1 else 'them'} (git push --force), or delete the branch or "
            "tag, or close the pull request."
        )
    commits = [sha]
    if leading:
        # All commits between the commit and the refs that lead to it.
        between = "\n".join([*leading.values(), f"^{sha}"])
        path = git(
            repository.folder, "rev-list", "--ancestry-path", "--stdin", stdin=between.encode()
        )
        commits += path.decode().split()
    return Purge(commits=commits, refs=list(leading), is_there=True)


def purge(repository: Repository, sha: str, open_refs: Collection[str]) -> Purge:
    """Removes the commits and refs of the plan that `plan_purge` makes, and returns the plan. The
    caller holds the repository's lock. Raises the errors of `plan_purge`, and HubError if the
    commit is still there afterwards."""
    planned = plan_purge(repository, sha, open_refs)
    _keep_parents(repository, planned)
    delete_refs(repository, planned["refs"])
    # Remove the large files before their pointers. If the purge is killed, the next purge still
    # finds the remaining large files by the pointers.
    named = {pointer.oid for pointer in reachable_pointers(repository)}
    LargeFiles(repository.folder).remove(
        pointer.oid for pointer in all_pointers(repository) if pointer.oid not in named
    )
    xet_store.empty(repository.folder, grace_seconds=0)
    # A killed push may leave a `.keep` file, for which git never removes the pack of the same name.
    # No push needs the `.keep` file now, because the caller holds the lock.
    for mark in repository.folder.glob("objects/pack/*.keep"):
        mark.unlink()
    git(repository.folder, "reflog", "expire", "--expire=now", "--all")
    git(repository.folder, "repack", "-a", "-d", "-q")
    git(repository.folder, "prune", "--expire=now")
    if _kind(repository, sha) is not None:
        raise HubError(
            f"{sha} is still in {repository.folder}: something that is not a ref leads to it, such "
            "as objects/info/alternates or HEAD. Remove that, then purge again."
        )
    return planned


def _keep_parents(repository: Repository, planned: Purge) -> None:
    """Adds a ref that keeps each remaining parent of the purged commits, if no other ref leads to
    the parent. Without it, the parent would be lost when the planned refs are deleted."""
    if not planned["is_there"]:
        return
    doomed = set(planned["commits"])
    commits = "\n".join(planned["commits"]).encode()
    lines = git(repository.folder, "rev-list", "--no-walk", "--parents", "--stdin", stdin=commits)
    parents = {parent for line in lines_of(lines) for parent in line.split()[1:]} - doomed
    going = set(planned["refs"])
    keep(repository, [one for one in parents if _refs_to(repository, one).keys() <= going])


def _refs_to(repository: Repository, sha: str) -> Mapping[str, str]:
    """Every ref that leads to the commit, with the sha that the ref names."""
    lines = git(
        repository.folder,
        "for-each-ref",
        f"--contains={sha}",
        "--format=%(refname) %(objectname)",
    )
    # A line has exactly one blank, because neither a ref nor a sha can have one.
    return dict(line.split(" ") for line in lines_of(lines))


def _kind(repository: Repository, sha: str) -> str | None:
    """The type of the object, such as `commit`. None if there is no such object."""
    answer = git(
        repository.folder, "cat-file", "--batch-check=%(objecttype)", stdin=f"{sha}\n".encode()
    )
    kind = answer.decode().split()[-1]
    return None if kind == "missing" else kind
