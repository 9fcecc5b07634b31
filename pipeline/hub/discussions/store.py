"""Stores discussions and pull requests, and what happened in each: comments, and changes of the
title and the status.

A pull request is a discussion with commits. The commits are on the ref `refs/pr/<num>`. The branch
that the pull request is for gets their changes only when the pull request is merged.
"""

import secrets
import time
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sqlalchemy import Connection, Row, String, cast, func, insert, select, update

from pipeline.hub.errors import BadRequest, Conflict, DiscussionNotFound
from pipeline.hub.git.process import PULL_REQUEST_PREFIX
from pipeline.hub.repositories.store import Repository
from pipeline.hub.schema import discussion_events as events
from pipeline.hub.schema import discussions as table

Status = Literal["draft", "open", "closed", "merged"]
EventType = Literal["comment", "status-change", "title-change"]
Json = dict[str, object]

OPEN: tuple[Status, ...] = ("draft", "open")
CLOSED: tuple[Status, ...] = ("closed", "merged")
MAX_TITLE = 200
MAX_TEXT = 64 * 1024
MAX_BYTES = 8 * 1024 * 1024
"""A discussion may store about this many bytes, with all versions of its comments. The limit exists
because the API sends the whole discussion in one answer."""


@dataclass(frozen=True, kw_only=True)
class Discussion:
    id: str
    repository_id: str
    num: int
    """The number in the repository, from 1. Discussions and pull requests are counted together."""
    title: str
    author: str
    status: Status
    created_at: float
    base: str | None
    """The full name of the branch that a pull request is for. None for a discussion."""
    merge_commit: str | None

    @property
    def is_pull_request(self) -> bool:
        return self.base is not None

    @property
    def ref(self) -> str:
        return f"{PULL_REQUEST_PREFIX}{self.num}"


@dataclass(frozen=True, kw_only=True)
class DiscussionEvent:
    id: str
    type: EventType
    author: str
    created_at: float
    data: Mapping[str, object]


def find_discussion(connection: Connection, repository: Repository, num: int) -> Discussion:
    """Raises DiscussionNotFound."""
    of_repository = table.c.repository_id == repository.id
    row = connection.execute(select(table).where(of_repository, table.c.num == num)).one_or_none()
    if row is None:
        raise DiscussionNotFound(
            f"The {repository.name} has no discussion and no pull request {num}: list them to find "
            "its number."
        )
    return _discussion(row)


def list_discussions(
    connection: Connection,
    repository: Repository,
    *,
    pull_requests: bool | None = None,
    statuses: Sequence[Status] = (*OPEN, *CLOSED),
    author: str | None = None,
) -> list[Discussion]:
    """The discussions of the repository, newest first. If `pull_requests` is True, only pull
    requests; if False, only discussions without commits; if None, both. If `author` is None, those
    of any author."""
    wanted = select(table).where(
        table.c.repository_id == repository.id, table.c.status.in_(statuses)
    )
    if pull_requests is not None:
        wanted = wanted.where(
            table.c.base.is_not(None) if pull_requests else table.c.base.is_(None)
        )
    if author is not None:
        wanted = wanted.where(table.c.author == author)
    return [_discussion(row) for row in connection.execute(wanted.order_by(table.c.num.desc()))]


def open_refs(connection: Connection, repository: Repository) -> list[str]:
    """The refs of the pull requests that are open."""
    return list(open_bases(connection, repository))


def open_bases(connection: Connection, repository: Repository) -> dict[str, str]:
    """The pull requests that are open: ref → the ref of the branch that it is for."""
    found = list_discussions(connection, repository, pull_requests=True, statuses=OPEN)
    return {each.ref: each.base for each in found if each.base is not None}


def next_num(connection: Connection, repository: Repository, refs: Mapping[str, str]) -> int:
    """The number of the next discussion. It is higher than the number of every discussion, and of
    every pull request's ref in `refs`: if an older version of the hub was killed while it opened a
    pull request, only the ref exists. The caller holds the repository's lock."""
    last = connection.execute(
        select(func.max(table.c.num)).where(table.c.repository_id == repository.id)
    ).scalar()
    numbers = [
        int(rest)
        for ref in refs
        if (rest := ref.removeprefix(PULL_REQUEST_PREFIX)) != ref and rest.isdigit()
    ]
    return max([last or 0, *numbers]) + 1


def add_discussion(
    connection: Connection,
    repository: Repository,
    *,
    num: int,
    title: str,
    text: str,
    author: str,
    base: str | None,
    status: Status,
) -> tuple[Discussion, DiscussionEvent]:
    """Adds a discussion with its first comment, and returns both. `base` is the full name of the
    branch that a pull request is for, or None for a discussion. Raises BadRequest."""
    connection.execute(
        insert(table).values(
            id=secrets.token_hex(12),
            repository_id=repository.id,
            num=num,
            title=_checked_title(title),
            author=author,
            status=status,
            base=base,
            created_at=time.time(),
        )
    )
    discussion = find_discussion(connection, repository, num)
    return discussion, add_comment(connection, discussion, author=author, text=text)


def add_comment(
    connection: Connection, discussion: Discussion, *, author: str, text: str
) -> DiscussionEvent:
    version = _version(author, text)
    _check_room(connection, discussion)
    return _add(connection, discussion, "comment", author, {"hidden": False, "history": [version]})


def change_status(
    connection: Connection,
    discussion: Discussion,
    *,
    author: str,
    status: Status,
    merge_commit: str | None = None,
) -> DiscussionEvent:
    """Raises Conflict if the pull request is merged, because its status then cannot change. Raises
    Conflict also if the discussion has this status already."""
    if discussion.status == "merged":
        raise Conflict(
            f"Pull request {discussion.num} is merged, so its status cannot change: open a new "
            "pull request."
        )
    if discussion.status == status:
        raise Conflict(f"Discussion {discussion.num} is {status} already.")
    values = {"status": status, "merge_commit": merge_commit}
    connection.execute(update(table).where(table.c.id == discussion.id).values(values))
    return _add(connection, discussion, "status-change", author, {"status": status})


def list_events(connection: Connection, discussion: Discussion) -> list[DiscussionEvent]:
    """The events of a discussion, oldest first."""
    wanted = select(events).where(events.c.discussion_id == discussion.id).order_by(events.c.seq)
    return [_event(row) for row in connection.execute(wanted)]


def _checked_title(title: str) -> str:
    """The title in one line. Raises BadRequest if it is empty or too long, or if it has control
    characters."""
    line = " ".join(title.split())
    # `isprintable` is also False for the joiners in emoji and in Persian, and for characters that
    # this version of Python does not know yet.
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in line):
        # The title becomes the message of the merge commit. Git refuses a NUL character there.
        raise BadRequest("A title may not have control characters: remove them.")
    if not line or len(line) > MAX_TITLE:
        raise BadRequest(
            f"A title must have 1 to {MAX_TITLE} characters, and this one has {len(line)}."
        )
    return line


def _version(author: str, text: str) -> Json:
    if not text.strip() or len(text) > MAX_TEXT:
        raise BadRequest(
            f"A comment must have 1 to {MAX_TEXT} characters and not only white space, and this "
            f"one has {len(text)}."
        )
    return {"raw": text, "author": author, "updated_at": time.time()}


def _check_room(connection: Connection, discussion: Discussion) -> None:
    """Raises Conflict if the discussion has reached `MAX_BYTES`."""
    stored = select(func.sum(func.length(cast(events.c.data, String))))
    size = connection.scalar(stored.where(events.c.discussion_id == discussion.id)) or 0
    if size >= MAX_BYTES:
        raise Conflict(f"Discussion {discussion.num} is full: open another discussion.")


def _add(
    connection: Connection,
    discussion: Discussion,
    type: EventType,
    author: str,
    data: Mapping[str, object],
) -> DiscussionEvent:
    event = DiscussionEvent(
        id=secrets.token_hex(12), type=type, author=author, created_at=time.time(), data=data
    )
    connection.execute(
        insert(events).values(
            id=event.id,
            discussion_id=discussion.id,
            type=type,
            author=author,
            created_at=event.created_at,
            data=data,
        )
    )
    return event


def _discussion(row: Row[tuple[object, ...]]) -> Discussion:
    return Discussion(
        id=row.id,
        repository_id=row.repository_id,
        num=row.num,
        title=row.title,
        author=row.author,
        status=row.status,
        created_at=row.created_at,
        base=row.base,
        merge_commit=row.merge_commit,
    )


def _event(row: Row[tuple[object, ...]]) -> DiscussionEvent:
    return DiscussionEvent(
        id=row.id, type=row.type, author=row.author, created_at=row.created_at, data=row.data
    )
