"""Removes a commit that was pushed by mistake, with its objects and its large files. Also removes
the later commits that contain it and are on no branch, and the refs of merged or closed pull
requests that lead to it.

Every step may be repeated. So if a purge is killed, it can be started again.
"""

from collections.abc import Collection
from typing import TypedDict

from pipeline.hub.errors import BadRequest, Conflict, HubError
from pipeline.hub.git.process import PUSHED_PREFIXES, git, lines_of
from pipeline.hub.large_files import xet_store
from pipeline.hub.repositories.garbage import sweep
from pipeline.hub.repositories.names import SHA
from pipeline.hub.repositories.objects import all_commits
from pipeline.hub.repositories.store import Repository

MAX_NAMED = 5


class Purge(TypedDict):
    commits: list[str]
    """The shas of all commits that are removed: the given commit, and the commits after it, which
    contain it."""
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
        names = ", ".join(pushed[:MAX_NAMED]) + (", …" if len(pushed) > MAX_NAMED else "")
        raise Conflict(
            f"{names} of the {repository.name} still {'leads' if len(pushed) == 1 else 'lead'} to "
            f"{sha}: first remove the commit there (git push --force), or delete the branch or "
            "tag, or close the pull request."
        )
    after = git(
        repository.folder,
        *("rev-list", "--ancestry-path", "--stdin", f"^{sha}"),
        stdin="".join(f"{each}\n" for each in all_commits(repository)).encode(),
    )
    return Purge(commits=[sha, *lines_of(after)], refs=leading, is_there=True)


def purge(repository: Repository, sha: str, open_refs: Collection[str]) -> Purge:
    """Removes the commits and refs of the plan that `plan_purge` makes, and returns the plan. The
    caller holds the repository's lock. Raises the errors of `plan_purge`, and HubError if the
    commit is still there afterwards."""
    planned = plan_purge(repository, sha, open_refs)
    commands = "".join(f"delete {ref}\n" for ref in planned["refs"])
    git(repository.folder, "update-ref", "--stdin", stdin=commands.encode())
    needed = set(all_commits(repository)).difference(planned["commits"])
    sweep(repository, needed, new_files_stay=False)
    xet_store.empty(repository.folder, grace_seconds=0)
    if _kind(repository, sha) is not None:
        raise HubError(
            f"{sha} is still in {repository.folder}: something that is not a ref leads to it, such "
            "as objects/info/alternates or HEAD. Remove that, then purge again."
        )
    return planned


def _refs_to(repository: Repository, sha: str) -> list[str]:
    """Every ref that leads to the commit."""
    return lines_of(
        git(repository.folder, "for-each-ref", f"--contains={sha}", "--format=%(refname)")
    )


def _kind(repository: Repository, sha: str) -> str | None:
    """The type of the object, such as `commit`. None if there is no such object."""
    answer = git(
        repository.folder, "cat-file", "--batch-check=%(objecttype)", stdin=f"{sha}\n".encode()
    )
    kind = answer.decode().split()[-1]
    return None if kind == "missing" else kind
