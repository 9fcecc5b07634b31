"""Finds the stored discussions and pull requests, and stores what happened in each: comments, and
changes of the status.

A pull request is a discussion with commits. The commits are on the ref `refs/pr/<num>`. The branch
that the pull request is for gets their changes only when the pull request is merged.
"""

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

from sqlalchemy import Connection, insert, select

from pipeline.hub.database import discussion_events as events
from pipeline.hub.database import discussions as table
from pipeline.hub.errors import BadRequest, NotFound
from pipeline.hub.git import PULL_REQUEST_PREFIX
from pipeline.hub.repositories import Repository

Status = Literal["draft", "open", "closed", "merged"]
EventType = Literal["comment", "status-change"]

OPEN: tuple[Status, ...] = ("draft", "open")
CLOSED: tuple[Status, ...] = ("closed", "merged")
MAX_TITLE = 200
MAX_TEXT = 64 * 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")


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
    text: str
    """The text of a comment, or the new status."""


def find_discussion(connection: Connection, repository: Repository, num: int) -> Discussion:
    """Raises NotFound."""
    of_repository = table.c.repository_id == repository.id
    row = connection.execute(select(table).where(of_repository, table.c.num == num)).one_or_none()
    if row is None:
        raise NotFound(
            f"The {repository.name} has no discussion and no pull request {num}: list them to find "
            "its number."
        )
    return Discussion(**row._asdict())


def list_discussions(
    connection: Connection, repository: Repository, statuses: Sequence[Status]
) -> list[Discussion]:
    """The discussions and pull requests of the repository, newest first."""
    wanted = select(table).where(
        table.c.repository_id == repository.id, table.c.status.in_(statuses)
    )
    rows = connection.execute(wanted.order_by(table.c.num.desc()))
    return [Discussion(**row._asdict()) for row in rows]


def open_bases(connection: Connection, repository: Repository) -> dict[str, str]:
    """The pull requests that are open: ref → the ref of the branch that it is for."""
    found = list_discussions(connection, repository, OPEN)
    return {each.ref: each.base for each in found if each.base is not None}


def add_comment(
    connection: Connection, discussion: Discussion, *, author: str, text: str
) -> DiscussionEvent:
    """Raises BadRequest."""
    if not text.strip() or len(text) > MAX_TEXT:
        raise BadRequest(
            f"A comment must have 1 to {MAX_TEXT} characters and not only white space, and this "
            f"one has {len(text)}."
        )
    return add_event(connection, discussion, "comment", author, text)


def list_events(connection: Connection, discussion: Discussion) -> list[DiscussionEvent]:
    """The events of a discussion, oldest first."""
    columns = (events.c[name] for name in ("id", "type", "author", "created_at", "text"))
    wanted = select(*columns).where(events.c.discussion_id == discussion.id).order_by(events.c.seq)
    return [DiscussionEvent(**row._asdict()) for row in connection.execute(wanted)]


def checked_title(title: str) -> str:
    """The title in one line. Raises BadRequest if it cannot be a title."""
    line = " ".join(title.split())
    # The title becomes the message of the merge commit. Git refuses a NUL character there.
    if not line or len(line) > MAX_TITLE or _CONTROL.search(line):
        raise BadRequest(
            f"A title must have 1 to {MAX_TITLE} characters and no control characters, and this "
            f"one has {len(line)} characters: change it."
        )
    return line


def add_event(
    connection: Connection, discussion: Discussion, type: EventType, author: str, text: str
) -> DiscussionEvent:
    event = DiscussionEvent(
        id=secrets.token_hex(12), type=type, author=author, created_at=time.time(), text=text
    )
    connection.execute(insert(events).values(discussion_id=discussion.id, **asdict(event)))
    return event
