"""Opens, merges and describes pull requests, for the routes of discussions and of commits."""

import logging

from sqlalchemy import Connection

from pipeline.hub.discussions.pull_requests import commits_of, difference, squash, try_merge
from pipeline.hub.discussions.store import (
    OPEN,
    Discussion,
    Status,
    add_comment,
    add_discussion,
    change_status,
    find_discussion,
    next_num,
)
from pipeline.hub.errors import BadRequest, Conflict, DiscussionNotFound, HubError
from pipeline.hub.events.log import record_ref_changes
from pipeline.hub.git.process import PULL_REQUEST_PREFIX, git
from pipeline.hub.http_json import iso_time
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import Identity, signature

logger = logging.getLogger(__name__)

Json = dict[str, object]

_NO_REF = "0" * 40


def open_pull_request(
    hub: Hub,
    repository: Repository,
    identity: Identity,
    *,
    title: str,
    text: str,
    status: Status,
    base: str = DEFAULT_BRANCH,
    head: str | None = None,
) -> Discussion:
    """Opens a pull request for the branch `base`. The pull request's ref first points to the commit
    `head`, or to the newest commit of `base` if `head` is None.

    The caller holds the repository's lock. It then wakes the deliverer, which sends the event to
    the webhooks. Raises BadRequest if the branch does not exist, or if the title or the text is
    wrong.
    """
    refs = read_refs(repository)
    if base not in refs:
        raise BadRequest(f"The {repository.name} has no commit on {base}: push one first.")
    # Store the discussion before the ref exists. A ref without a discussion could never be deleted,
    # and would keep its commits from being purged. If the hub is killed or git fails before the ref
    # exists, the pull request has no commits: a person can push commits to it, or close it.
    with hub.database.write() as connection:
        num = next_num(connection, repository, refs)
        discussion = add_and_record(
            connection, hub, repository, identity, num, title, text, base=base, status=status
        )
    git(repository.folder, "update-ref", discussion.ref, head or refs[base], _NO_REF)
    record_ref_changes(repository, hub.log)
    return discussion


def check_is_open(hub: Hub, repository: Repository, ref: str) -> None:
    """Raises Conflict if the pull request of this ref is closed or merged: such a pull request
    takes no more commits. Raises DiscussionNotFound if there is no pull request for this ref."""
    with hub.database.read() as connection:
        num = num_of(ref.removeprefix(PULL_REQUEST_PREFIX))
        discussion = find_discussion(connection, repository, num)
    if discussion.status not in OPEN:
        raise Conflict(f"Pull request {num} is {discussion.status}: open another one.")


def merge_pull_request(
    hub: Hub, repository: Repository, identity: Identity, num: int, comment: str | None
) -> None:
    """Merges a pull request: makes one commit of its changes, on the branch that it is for. Adds
    `comment` to the discussion. The caller holds the repository's lock and wakes the deliverer
    afterwards. Raises BadRequest and Conflict."""
    with hub.database.read() as connection:
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
        author=signature(identity),
    )
    git(repository.folder, "update-ref", found.base, commit, base)
    with hub.database.write() as connection:
        if comment:
            add_comment(connection, found, author=identity.user, text=comment)
        change_status(connection, found, author=identity.user, status="merged", merge_commit=commit)
        record_update(connection, hub, repository, num)
    record_ref_changes(repository, hub.log)


def add_and_record(
    connection: Connection,
    hub: Hub,
    repository: Repository,
    identity: Identity,
    num: int,
    title: str,
    text: str,
    *,
    base: str | None = None,
    status: Status = "open",
) -> Discussion:
    discussion, comment = add_discussion(
        connection,
        repository,
        num=num,
        title=title,
        text=text,
        author=identity.user,
        base=base,
        status=status,
    )
    hub.log.record_discussion(connection, repository, discussion, comment, action="create")
    return discussion


def record_update(connection: Connection, hub: Hub, repository: Repository, num: int) -> None:
    changed = find_discussion(connection, repository, num)
    hub.log.record_discussion(connection, repository, changed, None, action="update")


def describe_pull_request(
    repository: Repository,
    discussion: Discussion,
    events: list[tuple[float, Json]],
    with_difference: bool,
) -> Json:
    """The fields of a pull request that come from git. Adds its commits to `events`."""
    assert discussion.base is not None
    document: Json = {
        "changes": {"base": discussion.base, "mergeCommitId": discussion.merge_commit},
        "filesWithConflicts": [],
    }
    refs = read_refs(repository)
    base, head = refs.get(discussion.base), refs.get(discussion.ref)
    if base is None or head is None:
        return document
    for commit in commits_of(repository, base, head):
        event: Json = {
            "id": commit.sha[:24],
            "type": "commit",
            "author": {"name": commit.author, "type": "user"},
            "createdAt": iso_time(commit.committed_at),
            "data": {"subject": commit.title, "oid": commit.sha},
        }
        events.append((max(commit.committed_at, discussion.created_at), event))
    if discussion.status in OPEN:
        document["filesWithConflicts"] = _files_with_conflicts(repository, base, head)
    if with_difference:
        document["diff"] = difference(repository, base, head)
    return document


def _files_with_conflicts(repository: Repository, base: str, head: str) -> list[str] | bool:
    """The files that git cannot merge. True if git cannot make this list: clients of the Hugging
    Face Hub take it to mean that the pull request cannot be merged."""
    try:
        return list(try_merge(repository, base, head).conflicts)
    except HubError as error:
        # Only logged, because the rest of the pull request can be read. A merge gives the error.
        logger.warning(
            "the conflicts of a pull request of %s are not known: %s", repository.name, error
        )
        return True


def num_of(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DiscussionNotFound(
            f"{text!r} is not the number of a discussion: write a whole number."
        )
    return int(text)
