"""API routes for discussions and pull requests."""

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict
from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from pipeline.hub import discussions
from pipeline.hub.auth import Identity, identity_of, signature
from pipeline.hub.discussions import Discussion, DiscussionEvent, Status
from pipeline.hub.errors import BadRequest, Conflict, DiscussionNotFound
from pipeline.hub.git_process import PULL_REQUEST_PREFIX, git
from pipeline.hub.http_json import hub_url, iso_time, query_int, read_json
from pipeline.hub.names import DEFAULT_BRANCH, RepositoryName
from pipeline.hub.pull_requests import commits_of, difference, squash, try_merge
from pipeline.hub.refs import read_refs, record_ref_changes
from pipeline.hub.repositories import Repository
from pipeline.hub.service import Hub

PER_PAGE = 50
MAX_PAGE = 10_000
_NO_REF = "0" * 40

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
    num, with_difference = _num(rest[0]), request.query_params.get("diff") == "1"

    def details() -> Json:
        repository = hub.find(name)
        with hub.database.read() as connection:
            discussion = discussions.find_discussion(connection, repository, num)
            events = discussions.list_events(connection, discussion)
        found = [(event.created_at, event.as_json()) for event in events]
        document = as_json(discussion, repository)
        if discussion.is_pull_request:
            document |= _of_pull_request(repository, discussion, found, with_difference)
        document["events"] = [event for _, event in sorted(found, key=lambda pair: pair[0])]
        return document

    return JSONResponse(await run_in_threadpool(details))


async def _list(request: Request, hub: Hub, name: RepositoryName) -> Response:
    """The discussions, newest first. `?p=` is the page, from 0; `type`, `status` and `author`
    filter."""
    query = request.query_params
    page = query_int(request, "p", 0, at_most=MAX_PAGE)
    kinds = {None: None, "all": None, "discussion": False, "pull_request": True}
    statuses: dict[str | None, tuple[Status, ...]] = {
        None: (*discussions.OPEN, *discussions.CLOSED),
        "all": (*discussions.OPEN, *discussions.CLOSED),
        "open": discussions.OPEN,
        "closed": discussions.CLOSED,
    }
    if query.get("type") not in kinds or query.get("status") not in statuses:
        raise BadRequest(
            "`type` must be discussion, pull_request or all, and `status` open, closed or all."
        )

    def read() -> Json:
        repository = hub.find(name)
        with hub.database.read() as connection:
            found = discussions.list_discussions(
                connection,
                repository,
                pull_requests=kinds[query.get("type")],
                statuses=statuses[query.get("status")],
                author=query.get("author"),
            )
        start = page * PER_PAGE
        shown = [as_json(one, repository) for one in found[start : start + PER_PAGE]]
        return {
            "discussions": shown,
            "count": len(found),
            "start": start,
            "numClosedDiscussions": 0,
        }

    return JSONResponse(await run_in_threadpool(read))


async def change(request: Request, hub: Hub, name: RepositoryName, rest: Sequence[str]) -> Response:
    """POST to `discussions` (a new one), `discussions/<num>/{comment,title,status,merge}`, and
    `discussions/<num>/comment/<id>/{edit,hide}`."""
    identity = identity_of(request)
    identity.require_write("a discussion")
    match rest:
        case []:
            return await _create(request, hub, name, identity)
        case [num, "comment"]:
            comment = (await read_json(request, NewComment)).comment
            return await _comment(hub, name, _num(num), identity, comment)
        case [num, "comment", id, "edit"]:
            text = (await read_json(request, Edit)).content
            return await _edit(hub, name, _num(num), identity, id, text)
        case [num, "comment", id, "hide"]:
            return await _edit(hub, name, _num(num), identity, id, None)
        case [num, "title"]:
            title = (await read_json(request, NewTitle)).title
            return await _rename(hub, name, _num(num), identity, title)
        case [num, "status"]:
            return await _set_status(
                hub, name, _num(num), identity, await read_json(request, NewStatus)
            )
        case [num, "merge"]:
            return await _merge(hub, name, _num(num), identity, await read_json(request, Merge))
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
            num = discussions.next_num(connection, repository, read_refs(repository))
            return _store(connection, hub, repository, identity, num, body.title, body.description)

    discussion = await _changing(hub, name, identity, act)
    return JSONResponse(
        {
            "num": discussion.num,
            "pullRequest": discussion.is_pull_request,
            "url": f"{hub_url(request)}/{name.path}/discussions/{discussion.num}",
        }
    )


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
    """Opens a pull request for the branch `base`. Its ref begins at the commit `head`, or at the
    head of the branch if `head` is None.

    The caller holds the repository's lock and wakes the deliverer afterwards. Raises BadRequest if
    the branch does not exist.
    """
    refs = read_refs(repository)
    if base not in refs:
        raise BadRequest(f"The {repository.name} has no commit on {base}: push one first.")
    discussions.checked_title(title)
    with hub.database.read() as connection:
        num = discussions.next_num(connection, repository, refs)
    # The ref is made first. If the hub is killed now, `next_num` does not use this number again.
    ref = f"{PULL_REQUEST_PREFIX}{num}"
    git(repository.folder, "update-ref", ref, head or refs[base], _NO_REF)
    with hub.database.write() as connection:
        discussion = _store(
            connection, hub, repository, identity, num, title, text, base=base, status=status
        )
    record_ref_changes(repository, hub.log)
    return discussion


def check_is_open(hub: Hub, repository: Repository, ref: str) -> None:
    """Raises Conflict if the pull request of this ref is closed or merged, because it then takes no
    commits, and DiscussionNotFound."""
    with hub.database.read() as connection:
        num = _num(ref.removeprefix(PULL_REQUEST_PREFIX))
        discussion = discussions.find_discussion(connection, repository, num)
    if discussion.status not in discussions.OPEN:
        raise Conflict(f"Pull request {num} is {discussion.status}: open another one.")


def _store(
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
    discussion, comment = discussions.add_discussion(
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


async def _comment(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, text: str
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        comment = discussions.add_comment(connection, found, author=identity.user, text=text)
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
            discussions.hide_comment(connection, found, id, author=who)
            if text is None
            else discussions.edit_comment(connection, found, id, author=who, text=text)
        )
        hub.log.record_comment(connection, repository, found, comment, action="update")
        return comment

    return JSONResponse({"updatedComment": await _changing_one(hub, name, identity, num, act)})


async def _rename(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, title: str
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        event = discussions.change_title(connection, found, author=identity.user, title=title)
        _record_update(connection, hub, repository, num)
        return event

    return JSONResponse({"newTitle": await _changing_one(hub, name, identity, num, act)})


async def _set_status(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, body: NewStatus
) -> Response:
    def act(connection: Connection, repository: Repository, found: Discussion) -> DiscussionEvent:
        if body.comment:
            discussions.add_comment(connection, found, author=identity.user, text=body.comment)
        event = discussions.change_status(
            connection, found, author=identity.user, status=body.status
        )
        _record_update(connection, hub, repository, num)
        return event

    return JSONResponse({"newStatus": await _changing_one(hub, name, identity, num, act)})


async def _merge(
    hub: Hub, name: RepositoryName, num: int, identity: Identity, body: Merge
) -> Response:
    def act(repository: Repository) -> None:
        with hub.database.read() as connection:
            found = discussions.find_discussion(connection, repository, num)
        if found.base is None:
            raise BadRequest(
                f"Discussion {num} has no commits to merge: give the number of a pull request."
            )
        if found.status not in discussions.OPEN:
            raise Conflict(f"Pull request {num} is {found.status} already.")
        refs = read_refs(repository)
        if found.base not in refs or found.ref not in refs:
            raise Conflict(
                f"{found.base} or {found.ref} does not exist any more, so pull request {num} "
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
            if body.comment:
                discussions.add_comment(connection, found, author=identity.user, text=body.comment)
            discussions.change_status(
                connection, found, author=identity.user, status="merged", merge_commit=commit
            )
            _record_update(connection, hub, repository, num)
        record_ref_changes(repository, hub.log)

    await _changing(hub, name, identity, act)
    return JSONResponse({})


def _record_update(connection: Connection, hub: Hub, repository: Repository, num: int) -> None:
    changed = discussions.find_discussion(connection, repository, num)
    hub.log.record_discussion(connection, repository, changed, None, action="update")


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
            found = discussions.find_discussion(connection, repository, num)
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


def _of_pull_request(
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
    if discussion.status in discussions.OPEN:
        document["filesWithConflicts"] = list(try_merge(repository, base, head).conflicts)
    if with_difference:
        document["diff"] = difference(repository, base, head)
    return document


def _num(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise DiscussionNotFound(
            f"{text!r} is not the number of a discussion: write a whole number."
        )
    return int(text)
