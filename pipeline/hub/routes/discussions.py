"""API routes for discussions and pull requests."""

import logging
from html import escape
from typing import Annotated, Literal

from fastapi import APIRouter, Depends, Path
from pydantic import BaseModel
from starlette.requests import Request

from pipeline.hub.actions.discussions import Discussions, commits_of, difference, try_merge
from pipeline.hub.discussions import (
    CLOSED,
    OPEN,
    Discussion,
    DiscussionEvent,
    find_discussion,
    list_discussions,
    list_events,
)
from pipeline.hub.errors import HubError
from pipeline.hub.http_json import Json, hub_url, iso_time, json_body
from pipeline.hub.repositories import DEFAULT_BRANCH, Repository, read_refs
from pipeline.hub.routes.access import API, Locked, Readable, Writer, writer
from pipeline.hub.service import HubOf

logger = logging.getLogger(__name__)

router = APIRouter(prefix=f"{API}/discussions")
Num = Annotated[int, Path(lt=10**9)]


class NewDiscussion(BaseModel):
    title: str
    description: str
    pullRequest: bool = False


class NewComment(BaseModel):
    comment: str


class NewStatus(BaseModel):
    status: Literal["open", "closed"]
    comment: str | None = None


class Merge(BaseModel):
    comment: str | None = None


@router.get("")
def show_all(
    hub: HubOf,
    repository: Readable,
    type: Literal["all", "discussion", "pull_request"] = "all",
    status: Literal["all", "open", "closed"] = "all",
    author: str | None = None,
) -> Json:
    """The discussions, newest first. `huggingface_hub` reads pages; this is the only one."""
    with hub.database.read() as connection:
        statuses = {"all": (*OPEN, *CLOSED), "open": OPEN, "closed": CLOSED}[status]
        found = list_discussions(connection, repository, statuses)
    shown = [
        _as_json(one, repository)
        for one in found
        if author in (None, one.author)
        and (type == "all" or one.is_pull_request == (type == "pull_request"))
    ]
    return {"discussions": shown, "count": len(shown), "start": 0}


@router.get("/{num}")
def show(hub: HubOf, repository: Readable, num: Num, diff: bool = False) -> Json:
    with hub.database.read() as connection:
        discussion = find_discussion(connection, repository, num)
        events = list_events(connection, discussion)
    found = [(event.created_at, _event_as_json(event)) for event in events]
    document = _as_json(discussion, repository)
    if discussion.is_pull_request:
        document |= _describe_pull_request(repository, discussion, found, diff)
    document["events"] = [event for _, event in sorted(found, key=lambda pair: pair[0])]
    return document


async def _changing(hub: HubOf, identity: Writer, repository: Locked) -> Discussions:
    return Discussions(log=hub.log, repository=repository, identity=identity)


Changing = Annotated[Discussions, Depends(_changing)]
"""Declare it after the body, as `Locked`: the lock is not held while the body comes in. So the
routes check the token by `WRITING`, before the body is read."""
WRITING = [Depends(writer)]


@router.post("", dependencies=WRITING)
def create(
    request: Request,
    body: Annotated[NewDiscussion, json_body(NewDiscussion)],
    discussions: Changing,
) -> Json:
    made = discussions.open(
        title=body.title,
        text=body.description,
        status="draft" if body.pullRequest else "open",
        base=DEFAULT_BRANCH if body.pullRequest else None,
    )
    return {
        "num": made.num,
        "pullRequest": made.is_pull_request,
        "url": f"{hub_url(request)}/{discussions.repository.name.path}/discussions/{made.num}",
    }


@router.post("/{num}/comment", dependencies=WRITING)
def comment(
    body: Annotated[NewComment, json_body(NewComment)], discussions: Changing, num: Num
) -> Json:
    return {"newMessage": _event_as_json(discussions.comment(num, body.comment))}


@router.post("/{num}/status", dependencies=WRITING)
def set_status(
    body: Annotated[NewStatus, json_body(NewStatus)], discussions: Changing, num: Num
) -> Json:
    changed = discussions.set_status(num, body.status, body.comment)
    return {"newStatus": _event_as_json(changed)}


@router.post("/{num}/merge", dependencies=WRITING)
def merge(body: Annotated[Merge, json_body(Merge)], discussions: Changing, num: Num) -> Json:
    discussions.merge(num, body.comment)
    return {}


def _as_json(discussion: Discussion, repository: Repository) -> Json:
    return {
        "num": discussion.num,
        "title": discussion.title,
        "status": discussion.status,
        "author": {"name": discussion.author, "type": "user"},
        "repo": {"name": repository.name.id, "type": repository.name.type},
        "isPullRequest": discussion.is_pull_request,
        "createdAt": iso_time(discussion.created_at),
        "pinned": False,
        "locked": False,
    }


def _event_as_json(event: DiscussionEvent) -> Json:
    data: Json = {"status": event.text}
    if event.type == "comment":
        latest = {"raw": event.text, "html": f"<p>{escape(event.text)}</p>"}
        data = {"edited": False, "hidden": False, "latest": latest}
    return {
        "id": event.id,
        "type": event.type,
        "author": {"name": event.author, "type": "user"},
        "createdAt": iso_time(event.created_at),
        "data": data,
    }


def _describe_pull_request(
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
        return try_merge(repository, base, head)[1]
    except HubError as error:
        # Only logged, because the rest of the pull request can be read. A merge gives the error.
        logger.warning(
            "the conflicts of a pull request of %s are not known: %s", repository.name, error
        )
        return True
