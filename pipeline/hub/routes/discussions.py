"""API routes for discussions and pull requests."""

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.actions import discussions as acts
from pipeline.hub.actions.discussions import num_of
from pipeline.hub.discussions.pull_requests import commits_of, difference, try_merge
from pipeline.hub.discussions.store import (
    CLOSED,
    OPEN,
    Discussion,
    DiscussionEvent,
    Status,
    find_discussion,
    list_discussions,
    list_events,
)
from pipeline.hub.errors import BadRequest, HubError
from pipeline.hub.http_json import hub_url, iso_time, query_int, read_json
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.refs import read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import Identity, identity_of

logger = logging.getLogger(__name__)

PER_PAGE = 50
MAX_PAGE = 10_000

Answer = TypeVar("Answer")
Json = dict[str, object]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class NewDiscussion(_Body):
    title: str
    description: str
    pullRequest: bool = False


class NewComment(_Body):
    comment: str


class NewStatus(_Body):
    status: Literal["open", "closed"]
    comment: str | None = None


class Merge(_Body):
    comment: str | None = None


async def read(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """GET of `discussions` (the list) and of `discussions/<num>`."""
    if not rest:
        return await _list(request, hub, name)
    if len(rest) > 1:
        raise HTTPException(404)
    num, with_difference = num_of(rest[0]), request.query_params.get("diff") == "1"

    def details() -> Json:
        repository = hub.find(name)
        with hub.database.read() as connection:
            discussion = find_discussion(connection, repository, num)
            events = list_events(connection, discussion)
        found = [(event.created_at, _event_as_json(event)) for event in events]
        document = _as_json(discussion, repository)
        if discussion.is_pull_request:
            document |= _describe_pull_request(repository, discussion, found, with_difference)
        document["events"] = [event for _, event in sorted(found, key=lambda pair: pair[0])]
        return document

    return JSONResponse(await run_in_threadpool(details))


async def _list(request: Request, hub: Hub, name: RepositoryName) -> Response:
    """The discussions, newest first. `?p=` is the number of the page, from 0. The query may also
    have `type`, `status` and `author`: only the discussions that match them are listed."""
    query = request.query_params
    page = query_int(request, "p", 0, at_most=MAX_PAGE)
    kinds = {"all": None, "discussion": False, "pull_request": True}
    statuses: dict[str, tuple[Status, ...]] = {
        "all": (*OPEN, *CLOSED),
        "open": OPEN,
        "closed": CLOSED,
    }
    type, status = query.get("type", "all"), query.get("status", "all")
    for key, value, known in (("type", type, [*kinds]), ("status", status, [*statuses])):
        if value not in known:
            raise BadRequest(f"{key}={value!r}: choose one of {', '.join(known)}.")

    def read() -> Json:
        repository = hub.find(name)
        with hub.database.read() as connection:
            matching = list_discussions(
                connection,
                repository,
                pull_requests=kinds[type],
                author=query.get("author"),
            )
        found = [one for one in matching if one.status in statuses[status]]
        start = page * PER_PAGE
        shown = [_as_json(one, repository) for one in found[start : start + PER_PAGE]]
        return {
            "discussions": shown,
            "count": len(found),
            "start": start,
            # Also counts those that `status` leaves out.
            "numClosedDiscussions": sum(one.status in CLOSED for one in matching),
        }

    return JSONResponse(await run_in_threadpool(read))


async def change(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """POST to `discussions` (opens a discussion) and `discussions/<num>/{comment,status,merge}`."""
    identity = identity_of(request)
    identity.require_write("a discussion")
    if not rest:
        return await _create(request, hub, name, identity)
    key, act = await _change_of(request, rest)
    change = partial(act, hub.log, identity=identity, num=num_of(rest[0]))
    changed = await _changing(hub, name, identity, change)
    return JSONResponse({} if changed is None else {key: _event_as_json(changed)})


async def _change_of(
    request: Request, rest: Sequence[str]
) -> tuple[str, Callable[..., DiscussionEvent | None]]:
    """The key of the answer, and the function that makes the change."""
    match rest:
        case [_, "comment"]:
            comment = await read_json(request, NewComment)
            return "newMessage", partial(acts.add, text=comment.comment)
        case [_, "status"]:
            new = await read_json(request, NewStatus)
            act = partial(acts.set_status, status=new.status, comment=new.comment)
            return "newStatus", act
        case [_, "merge"]:
            merge = await read_json(request, Merge)
            return "", partial(acts.merge_pull_request, comment=merge.comment)
    raise HTTPException(404)


async def _create(request: Request, hub: Hub, name: RepositoryName, identity: Identity) -> Response:
    body = await read_json(request, NewDiscussion)

    act = (
        partial(acts.open_pull_request, status="draft")
        if body.pullRequest
        else acts.open_discussion
    )
    opening = partial(act, hub.log, identity=identity, title=body.title, text=body.description)
    discussion = await _changing(hub, name, identity, opening)
    return JSONResponse(
        {
            "num": discussion.num,
            "pullRequest": discussion.is_pull_request,
            "url": f"{hub_url(request)}/{name.path}/discussions/{discussion.num}",
        }
    )


async def _changing(
    hub: Hub, name: RepositoryName, identity: Identity, act: Callable[[Repository], Answer]
) -> Answer:
    async with hub.locked(name, identity) as repository:
        answer = await run_in_threadpool(act, repository)
    hub.log.wake()
    return answer


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
    return {
        "id": event.id,
        "type": event.type,
        "author": {"name": event.author, "type": "user"},
        "createdAt": iso_time(event.created_at),
        "data": _comment_as_json(event.data) if event.type == "comment" else event.data,
    }


def _comment_as_json(data: Mapping[str, object]) -> Json:
    history = data["history"]
    assert isinstance(history, list)
    versions = [
        {
            "raw": version["raw"],
            "html": f"<p>{escape(version['raw'])}</p>",
            "updatedAt": iso_time(version["updated_at"]),
            "author": {"name": version["author"], "type": "user"},
        }
        for version in history
    ]
    return {
        "edited": len(versions) > 1,
        "hidden": data["hidden"],
        "numEdits": len(versions) - 1,
        "history": versions,
        "latest": versions[-1],
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
        return list(try_merge(repository, base, head).conflicts)
    except HubError as error:
        # Only logged, because the rest of the pull request can be read. A merge gives the error.
        logger.warning(
            "the conflicts of a pull request of %s are not known: %s", repository.name, error
        )
        return True
