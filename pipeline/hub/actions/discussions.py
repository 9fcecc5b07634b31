"""What clients do with discussions and pull requests, and what git does for them: it lists the
commits of a pull request, shows its difference, and merges it."""

import logging
import tempfile
from dataclasses import dataclass

from sqlalchemy import Connection

from pipeline.hub.contents import Commit, list_commits, read_commit
from pipeline.hub.discussions import (
    OPEN,
    Discussion,
    DiscussionEvent,
    Status,
    add_comment,
    add_discussion,
    change_status,
    find_discussion,
)
from pipeline.hub.errors import BadRequest, Conflict, HubError, RequestError
from pipeline.hub.events import Event, EventLog, record_ref_changes
from pipeline.hub.git import NO_REF, PULL_REQUEST_PREFIX, git
from pipeline.hub.repositories import Repository, read_refs
from pipeline.hub.tokens import Identity, Signature, signature

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
    if read_commit(repository, base).tree == tree:
        return base
    commit = git(
        repository.folder,
        *("commit-tree", tree, "-p", base, "-F", "-"),
        stdin=message.encode(),
        extra=author.environment,
    )
    return commit.decode().strip()


@dataclass(frozen=True, kw_only=True)
class Discussions:
    """Changes the discussions of a repository for a client. Each method stores the change together
    with its event. The caller holds the repository's lock."""

    log: EventLog
    repository: Repository
    identity: Identity

    def open(
        self,
        *,
        title: str,
        text: str,
        status: Status = "open",
        base: str | None = None,
        head: str | None = None,
    ) -> Discussion:
        """Opens a discussion, or a pull request for the branch `base`. The pull request's ref first
        points to the commit `head`, or to the newest commit of `base` if `head` is None. Raises
        BadRequest if the branch does not exist, or if the title or the text is wrong."""
        refs = read_refs(self.repository)
        if base is not None and base not in refs:
            raise BadRequest(f"The {self.repository.name} has no commit on {base}: push one first.")
        # Store the discussion before the ref exists. A ref without a discussion could never be
        # deleted, and would keep its commits from being purged. If the hub is killed or git fails
        # before the ref exists, the pull request has no commits: a person can push commits to it,
        # or close it.
        with self.log.database.write() as connection:
            found, first = add_discussion(
                connection,
                self.repository,
                title=title,
                text=text,
                author=self.identity.user,
                base=base,
                status=status,
            )
            event = Event(action="create", scope="discussion", discussion=found, comment=first)
            self.log.record(connection, self.repository, event)
        if base is not None:
            git(self.repository.folder, "update-ref", found.ref, head or refs[base], NO_REF)
            record_ref_changes(self.repository, self.log)
        return found

    def comment(self, num: int, text: str) -> DiscussionEvent:
        with self.log.database.write() as connection:
            return self._comment(connection, num, text)

    def set_status(self, num: int, status: Status, text: str | None) -> DiscussionEvent:
        """Changes the status, and adds the comment `text`. The comment is an event of its own, so
        that a webhook which reads comments gets this one too."""
        with self.log.database.write() as connection:
            return self._set_status(connection, num, status, text)

    def merge(self, num: int, text: str | None) -> None:
        """Merges a pull request: makes one commit of its changes, on the branch that it is for.
        Adds the comment `text`. Raises BadRequest and Conflict."""
        repository = self.repository
        with self.log.database.read() as connection:
            found = find_discussion(connection, repository, num)
        if found.base is None:
            raise BadRequest(
                f"Discussion {num} has no commits to merge: give the number of a pull request."
            )
        if found.status not in OPEN:
            raise Conflict(f"Pull request {num} is {found.status} already: merge an open one.")
        refs = read_refs(repository)
        if found.base not in refs or found.ref not in refs:
            raise Conflict(
                f"{found.base} or {found.ref} does not exist, so pull request {num} "
                "cannot be merged: open another one."
            )
        base, head = refs[found.base], refs[found.ref]
        titles = [f"- {one.title} ({one.sha})" for one in commits_of(repository, base, head)]
        commit = squash(
            repository,
            base,
            head,
            message="\n".join([f"{found.title} (#{num})", "", *titles, ""]),
            author=signature(self.identity),
        )
        with self.log.database.write() as connection:
            self._set_status(connection, num, "merged", text, merge_commit=commit)
            # The branch moves last, because the comment may be refused. If git fails, nothing is
            # stored. If the hub is killed before the transaction ends, the branch has the commit,
            # and the pull request stays open.
            git(repository.folder, "update-ref", found.base, commit, base)
        record_ref_changes(repository, self.log)

    def _comment(self, connection: Connection, num: int, text: str) -> DiscussionEvent:
        found = find_discussion(connection, self.repository, num)
        added = add_comment(connection, found, author=self.identity.user, text=text)
        event = Event(action="create", scope="discussion.comment", discussion=found, comment=added)
        self.log.record(connection, self.repository, event)
        return added

    def _set_status(
        self,
        connection: Connection,
        num: int,
        status: Status,
        text: str | None,
        *,
        merge_commit: str | None = None,
    ) -> DiscussionEvent:
        if text:
            self._comment(connection, num, text)
        found = find_discussion(connection, self.repository, num)
        changed = change_status(
            connection, found, author=self.identity.user, status=status, merge_commit=merge_commit
        )
        after = find_discussion(connection, self.repository, num)
        event = Event(action="update", scope="discussion", discussion=after)
        self.log.record(connection, self.repository, event)
        return changed


def check_takes_commits(log: EventLog, repository: Repository, ref: str) -> None:
    """Raises Conflict if the pull request of this ref is closed or merged: such a pull request
    takes no more commits. Raises NotFound if there is no pull request for this ref."""
    with log.database.read() as connection:
        num = int(ref.removeprefix(PULL_REQUEST_PREFIX))
        discussion = find_discussion(connection, repository, num)
    if discussion.status not in OPEN:
        raise Conflict(f"Pull request {num} is {discussion.status}: open another one.")
