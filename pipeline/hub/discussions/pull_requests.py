"""What git does for a pull request: lists its commits, shows its difference, and merges it. Nothing
here moves a ref. The caller moves the refs, and holds the repository's lock."""

import logging
import tempfile

from pipeline.hub.contents.history import Commit, list_commits
from pipeline.hub.errors import Conflict, HubError, RequestError
from pipeline.hub.git.process import git
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens.auth import Signature

logger = logging.getLogger(__name__)

MAX_COMMITS = 250
MAX_DIFF_BYTES = 1024 * 1024
MAX_SECONDS = 30.0
"""How long git may take to compare or merge two commits. A merge holds the repository's lock."""
_CUT = "\n[The difference is longer, and is cut here.]\n"
_NOT_SHOWN = (
    "[The difference is not shown, because git failed: the pull request may have no commit in "
    f"common with its branch, or git needed more than {MAX_SECONDS:g} s. The hub's log has git's "
    "error.]\n"
)


def commits_of(repository: Repository, base: str, head: str) -> list[Commit]:
    """The commits that `head` has and `base` does not have, oldest first. If there are more than
    `MAX_COMMITS`, the oldest are left out."""
    found = list_commits(repository, head, skip=0, limit=MAX_COMMITS, without=base)
    return found[::-1]


def difference(repository: Repository, base: str, head: str) -> str:
    """The output of `git diff` from the last common commit of `base` and `head` to `head`, or a
    line that says why it is not shown."""
    # Into a file, because the difference of two datasets may be larger than the memory.
    with tempfile.TemporaryFile() as file:
        try:
            git(
                repository.folder,
                *("diff", "--no-ext-diff", "--no-color", f"{base}...{head}"),
                into=file,
                seconds=MAX_SECONDS,
            )
        except HubError as error:
            logger.warning("the difference of a pull request is not shown: %s", error)
            return _NOT_SHOWN
        file.seek(0)
        text = file.read(MAX_DIFF_BYTES).decode(errors="replace")
        return text + _CUT if file.read(1) else text


def try_merge(repository: Repository, base: str, head: str) -> tuple[str, list[str]]:
    """Merges two commits into a tree, and moves no ref. Returns the tree, and the files that git
    cannot merge. Raises Conflict if git fails: the two may have no commit in common, git may need
    more than `MAX_SECONDS`, or it may be older than 2.38 and cannot merge without a work tree."""
    try:
        output = git(
            repository.folder,
            *("merge-tree", "--write-tree", "-z", "--name-only", "--no-messages", base, head),
            may_exit_with=(1,),
            seconds=MAX_SECONDS,
        )
    except RequestError:
        raise
    except HubError as error:
        raise Conflict(
            f"The hub cannot merge the pull request ({error}). Merge it in a clone, and push the "
            "branch; or open another pull request, from a commit of the branch."
        ) from None
    tree, *files = output.decode(errors="replace").rstrip("\0").split("\0")
    return tree, [file for file in files if file]


def squash(repository: Repository, base: str, head: str, *, message: str, author: Signature) -> str:
    """Makes one commit on top of `base` that has all changes of the commits up to `head`, and
    returns its sha. Returns `base` if these commits change nothing. Raises Conflict if git cannot
    merge some files, and its message names them. Also raises the errors of `try_merge`."""
    tree, conflicts = try_merge(repository, base, head)
    if conflicts:
        raise Conflict(
            f"The pull request cannot be merged, because both sides changed "
            f"{', '.join(conflicts[:10])}: merge the branch into the pull request first."
        )
    if git(repository.folder, "rev-parse", f"{base}^{{tree}}").decode().strip() == tree:
        return base
    commit = git(
        repository.folder,
        *("commit-tree", tree, "-p", base, "-F", "-"),
        stdin=message.encode(),
        extra=author.environment,
    )
    return commit.decode().strip()
