"""The git side of a pull request: its commits, its difference, and the merge.

The caller holds the repository's lock where a ref moves.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.hub.auth import Signature
from pipeline.hub.contents import Commit, list_commits
from pipeline.hub.errors import Conflict, HubError
from pipeline.hub.git_process import git, git_beginning
from pipeline.hub.repositories import Repository

MAX_COMMITS = 250
MAX_DIFF_BYTES = 1024 * 1024
MAX_SECONDS = 30.0
"""For git to compare or to merge two commits: a merge holds the repository's lock."""
_CUT = "\n[The difference is longer, and is cut here.]\n"
_UNKNOWN_OPTION = re.compile(r"unknown option|usage: git merge-tree")


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What a merge of two commits would be."""

    tree: str
    conflicts: Sequence[str]
    """The files that both sides changed; without any, `tree` is the result."""


def commits_of(repository: Repository, base: str, head: str) -> list[Commit]:
    """Those that are not on the base, oldest first."""
    found = list_commits(repository, head, skip=0, limit=MAX_COMMITS, without=base)
    return found[::-1]


def difference(repository: Repository, base: str, head: str) -> str:
    """What the pull request changes since it left the base, as `git diff` shows it."""
    output = git_beginning(
        repository.folder,
        *("diff", "--no-ext-diff", "--no-color", f"{base}...{head}"),
        max_bytes=MAX_DIFF_BYTES + 1,
        seconds=MAX_SECONDS,
    )
    text = output[:MAX_DIFF_BYTES].decode(errors="replace")
    return text + _CUT if len(output) > MAX_DIFF_BYTES else text


def try_merge(repository: Repository, base: str, head: str) -> Merged:
    """Merges without a work tree, and moves no ref. Raises HubError if git is older than 2.38, and
    TooSlow."""
    try:
        output = git(
            repository.folder,
            *("merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", base, head),
            may_exit_with=(1,),
            seconds=MAX_SECONDS,
        )
    except HubError as error:
        if _UNKNOWN_OPTION.search(str(error)):
            raise HubError("To merge pull requests, the hub needs git 2.38 or newer.") from None
        raise
    tree, *files = output.decode(errors="replace").rstrip("\0").split("\0")
    return Merged(tree=tree, conflicts=[file for file in files if file])


def squash(repository: Repository, base: str, head: str, *, message: str, author: Signature) -> str:
    """One commit on top of `base` that holds what the commits up to `head` change. The base itself
    if they change nothing. Raises Conflict, which names files."""
    merged = try_merge(repository, base, head)
    if merged.conflicts:
        raise Conflict(
            f"The pull request cannot be merged, because both sides changed "
            f"{', '.join(merged.conflicts[:10])}: send a commit to it that settles the difference."
        )
    if git(repository.folder, "rev-parse", f"{base}^{{tree}}").decode().strip() == merged.tree:
        return base
    who = {
        f"GIT_{role}_{field}": value
        for role in ("AUTHOR", "COMMITTER")
        for field, value in (("NAME", author.name), ("EMAIL", author.email))
    }
    commit = git(
        repository.folder,
        *("commit-tree", merged.tree, "-p", base, "-F", "-"),
        stdin=message.encode(),
        extra=who,
    )
    return commit.decode().strip()
