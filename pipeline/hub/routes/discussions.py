"""API routes for discussions and pull requests."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub.discussions.store import (
    CLOSED,
    OPEN,
    Discussion,
    DiscussionEvent,
    Status,
    add_comment,
    change_status,
    change_title,
    edit_comment,
    find_discussion,
    hide_comment,
    list_discussions,
    list_events,
    next_num,
)
from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import hub_url, iso_time, query_int, read_json
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.refs import read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.routes.pull_requests import (
    add_and_record,
    describe_pull_request,
    merge_pull_request,
    num_of,
    open_pull_request,
    record_update,
)
from pipeline.hub.service import Hub
from pipeline.hub.tokens.auth import Identity, identity_of

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


class NewTitle(_Body):
    title: str


class NewStatus(_Body):
    status: Literal["open", "closed"]
    comment: str | None = None


class Merge(_Body):
    comment: str | None = None


class Edit(_Body):
    content: str


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
        found = [(event.created_at, event.as_json()) for event in events]
        document = as_json(discussion, repository)
        if discussion.is_pull_request:
            document |= describe_pull_request(repository, discussion, found, with_difference)
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
        shown = [as_json(one, repository) for one in found[start : start + PER_PAGE]]
        return {
            "discussions": shown,
            "count": len(found),
            "start": start,
            # Also counts those that `status` leaves out.
            "numClosedDiscussions": sum(one.status in CLOSED for one in matching),
        }

    return JSONResponse(await run_in_threadpool(read))


async def change(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """POST to `discussions` (opens a discussion), `discussions/<num>/{comment,title,status,merge}`,
    and `discussions/<num>/comment/<id>/{edit,hide}`."""
    identity = identity_of(request)
    identity.require_write("a discussion")
    match rest:
        case []:
            return await _create(request, hub, name, identity)
        case [num, "comment"]:
            comment = (await read_json(request, NewComment)).comment
            return await _comment(hub, name, num_of(num), identity, comment)
        case [num, "comment", id, "edit"]:
            text = (await read_json(request, Edit)).content
            return await _edit(hub, name, num_of(num), identity, id, text)
        case [num, "comment", id, "hide"]:
            return await _edit(hub, name, num_of(num), identity, id, None)
        case [num, "title"]:
            title = (await read_json(request, NewTitle)).title
            return await _rename(hub, name, num_of(num), identity, title)
        case [num, "status"]:
            return await _set_status(
                hub, name, num_of(num), identity, await read_json(request, NewStatus)
            )
        case [num, "merge"]:
            return await _merge(hub, name, num_of(num), identity, await read_json(request, Merge))
    raise HTTPException(404)


async def _create(request: Request, hub: Hub, name: RepositoryName, identity: Identity) -> Response:
    body = await read_json(request, NewDiscussion)

    def act(repository: Repository) -> Discussion:
        if body.pullRequest:
            return open_pull_request(
                hub,
                repository,
                identity,
                title=body.title,
                text=body.description,
                status="draft",
            )
        with hub.database.write() as connection:
            num = next_num(connection, repository, read_refs(repository))
            return add_and_record(
                connection, hub, repository, identity, num, body.title, body.description
            )

    discussion = await _changing(hub, name, identity, act)
    return JSONResponse(
        {
            "num": discussion.num,
            "pullRequest": discussion.is_pull_request,
            "url": f"{hub_url(request)}/{name.path}/discussions/{discussion.num}",
        }
    )


async def _comment(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, text: str
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        comment = add_comment(connection, found, author=identity.user, text=text)
        hub.log.record_comment(connection, repository, found, comment, action="create")
        return comment

    return JSONResponse({"newMessage": await _changing_one(hub, name, identity, num, act)})


async def _edit(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, id: str, text: str | None
) -> Response:
    """Changes a comment to `text`, or hides it if `text` is None."""

    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        who = identity.user
        comment = (
            hide_comment(connection, found, id, author=who)
            if text is None
            else edit_comment(connection, found, id, author=who, text=text)
        )
        hub.log.record_comment(connection, repository, found, comment, action="update")
        return comment

    return JSONResponse({"updatedComment": await _changing_one(hub, name, identity, num, act)})


async def _rename(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, title: str
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        event = change_title(connection, found, author=identity.user, title=title)
        record_update(connection, hub, repository, num)
        return event

    return JSONResponse({"newTitle": await _changing_one(hub, name, identity, num, act)})


async def _set_status(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, body: NewStatus
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        if body.comment:
            add_comment(connection, found, author=identity.user, text=body.comment)
        event = change_status(connection, found, author=identity.user, status=body.status)
        record_update(connection, hub, repository, num)
        return event

    return JSONResponse({"newStatus": await _changing_one(hub, name, identity, num, act)})


async def _merge(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, body: Merge
) -> Response:
    def act(repository: Repository) -> None:
        merge_pull_request(hub, repository, identity, num, body.comment)

    await _changing(hub, name, identity, act)
    return JSONResponse({})


async def _changing(
    hub: Hub, name: RepositoryName, identity: Identity, act: Callable[[Repository], Answer]
) -> Answer:
    async with hub.locked(name, identity) as repository:
        answer = await run_in_threadpool(act, repository)
    hub.log.wake()
    return answer


async def _changing_one(
    hub: Hub,
    name: RepositoryName,
    identity: Identity,
    num: int,
    act: Callable[[Connection, Repository, Discussion], DiscussionEvent],
) -> Json:
    def changing(repository: Repository) -> Json:
        with hub.database.write() as connection:
            found = find_discussion(connection, repository, num)
            return act(connection, repository, found).as_json()

    return await _changing(hub, name, identity, changing)


def as_json(discussion: Discussion, repository: Repository) -> Json:
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
