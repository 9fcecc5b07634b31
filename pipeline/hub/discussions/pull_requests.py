"""What git does for a pull request: lists its commits, shows its difference, and merges it. Nothing
here moves a ref. The caller moves the refs, and holds the repository's lock."""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.hub.contents.history import Commit, list_commits
from pipeline.hub.errors import Conflict, HubError, NotSupported, TooSlow
from pipeline.hub.git.process import git, git_beginning
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens.auth import Signature

logger = logging.getLogger(__name__)

MAX_COMMITS = 250
MAX_DIFF_BYTES = 1024 * 1024
MAX_SECONDS = 30.0
"""How long git may take to compare or merge two commits. A merge holds the repository's lock."""
_CUT = "\n[The difference is longer, and is cut here.]\n"
_NOT_SHOWN = f"[The difference is not shown, because git needed more than {MAX_SECONDS:g} s.]\n"
_FAILED = (
    "[The difference is not shown, because git failed: the pull request may have no commit in "
    "common with its branch. The hub's log has git's error.]\n"
)
_UNKNOWN_OPTION = re.compile(r"unknown option|usage: git merge-tree")
_UNRELATED = "refusing to merge unrelated histories"


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The result of merging two commits."""

    tree: str
    conflicts: Sequence[str]
    """The files that git cannot merge. If there are none, `tree` is the merged tree."""


def commits_of(repository: Repository, base: str, head: str) -> list[Commit]:
    """The commits that `head` has and `base` does not have, oldest first. If there are more than
    `MAX_COMMITS`, the oldest are left out."""
    found = list_commits(repository, head, skip=0, limit=MAX_COMMITS, without=base)
    return found[::-1]


def difference(repository: Repository, base: str, head: str) -> str:
    """The output of `git diff` from the last common commit of `base` and `head` to `head`, or a
    line that says why it is not shown."""
    try:
        output = git_beginning(
            repository.folder,
            *("diff", "--no-ext-diff", "--no-color", f"{base}...{head}"),
            max_bytes=MAX_DIFF_BYTES + 1,
            seconds=MAX_SECONDS,
        )
    except TooSlow:
        return _NOT_SHOWN
    except HubError as error:
        logger.warning("the difference of a pull request is not shown: %s", error)
        return _FAILED
    text = output[:MAX_DIFF_BYTES].decode(errors="replace")
    return text + _CUT if len(output) > MAX_DIFF_BYTES else text


def try_merge(repository: Repository, base: str, head: str) -> Merged:
    """Merges two commits into a tree, and moves no ref. Raises Conflict if the two have no commit
    in common, or if git needs more than `MAX_SECONDS`. Raises NotSupported if git is older than
    2.38, because an older git cannot merge without a work tree."""
    try:
        output = git(
            repository.folder,
            *("merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", base, head),
            may_exit_with=(1,),
            seconds=MAX_SECONDS,
        )
    except TooSlow:
        raise Conflict(
            f"The pull request cannot be merged here, because git needs more than {MAX_SECONDS:g} "
            "s: merge it in a clone, and push the branch."
        ) from None
    except HubError as error:
        if _UNRELATED in str(error):
            raise Conflict(
                "The pull request cannot be merged, because it has no commit in common with its "
                "branch (a force-push may have replaced the branch): open another pull request, "
                "from a commit of the branch."
            ) from None
        if _UNKNOWN_OPTION.search(str(error)):
            raise NotSupported(
                "The hub's git is too old to merge pull requests: install git 2.38 or newer."
            ) from None
        raise
    tree, *files = output.decode(errors="replace").rstrip("\0").split("\0")
    return Merged(tree=tree, conflicts=[file for file in files if file])


def squash(repository: Repository, base: str, head: str, *, message: str, author: Signature) -> str:
    """Makes one commit on top of `base` that has all changes of the commits up to `head`, and
    returns its sha. Returns `base` if these commits change nothing. Raises Conflict if git cannot
    merge some files, and its message names them. Also raises the errors of `try_merge`."""
    merged = try_merge(repository, base, head)
    if merged.conflicts:
        raise Conflict(
            f"The pull request cannot be merged, because both sides changed "
            f"{', '.join(merged.conflicts[:10])}: merge the branch into the pull request first."
        )
    if git(repository.folder, "rev-parse", f"{base}^{{tree}}").decode().strip() == merged.tree:
        return base
    commit = git(
        repository.folder,
        *("commit-tree", merged.tree, "-p", base, "-F", "-"),
        stdin=message.encode(),
        extra=author.environment,
    )
    return commit.decode().strip()
