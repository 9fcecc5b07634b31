"""API routes for discussions and pull requests: they list, open, comment on, close and merge them.

A pull request is a discussion with commits. The commits are on the ref `refs/pr/<num>`. The branch
that the pull request is for gets their changes only when the pull request is merged.

Each change is stored together with its event.
"""

import logging
import tempfile
import time
from dataclasses import dataclass
from html import escape
from secrets import token_hex
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Path
from pydantic import BaseModel, StringConstraints
from sqlalchemy import Connection, Row, func, insert, select, update
from starlette.requests import Request

from jobs.spec import DEFAULT_BRANCH
from pipeline.hub.commits import commit_tree
from pipeline.hub.contents import have_equal_files
from pipeline.hub.database import discussion_events as events
from pipeline.hub.database import discussions as table
from pipeline.hub.errors import BadRequest, Conflict, HubError, NotFound, RequestError
from pipeline.hub.events import Event, EventLog, owner_id, record_ref_changes
from pipeline.hub.git import NO_REF, PULL_REQUEST_PREFIX, Signature, git
from pipeline.hub.http_json import Json, hub_url, iso_time, json_body
from pipeline.hub.repositories import OPEN, Repository, read_refs
from pipeline.hub.service import API, HubOf, Identity, Locked, Readable, Writer
from receiver.payload import EventAction

logger = logging.getLogger(__name__)

Status = Literal["draft", "open", "closed", "merged"]

CLOSED = ("closed", "merged")
MAX_TITLE = 200
MAX_TEXT = 64 * 1024
_PRINTED = r"[^\x00-\x1f\x7f-\x9f]"
MAX_DIFF_BYTES = 1024 * 1024
MAX_TITLES = 250
"""How many commits of a pull request the message of its merge names: the newest ones."""
MAX_SECONDS = 30.0
"""How long git may take to compare or merge two commits. A merge holds the repository's lock."""
_CUT = "\n[The difference is longer, and is cut here.]\n"
_NOT_SHOWN = (
    "[The difference is not shown, because git failed: the pull request may have no commit, or no "
    f"commit in common with its branch, or git needed more than {MAX_SECONDS:g} s. The hub's log "
    "has git's error.]\n"
)


router = APIRouter(prefix=f"{API}/discussions")
Num = Annotated[int, Path(lt=10**9)]
# Git refuses a NUL character in the message of a merge, and a message begins with one line.
Title = Annotated[
    str, StringConstraints(strip_whitespace=True, pattern=rf"^{_PRINTED}{{1,{MAX_TITLE}}}$")
]
Text = Annotated[str, StringConstraints(pattern=r"\S", max_length=MAX_TEXT)]


class NewDiscussion(BaseModel):
    title: Title
    description: Text
    pullRequest: bool = False


class NewComment(BaseModel):
    comment: Text


class Merge(BaseModel):
    comment: Text | Literal[""] | None = None


class NewStatus(Merge):
    status: Literal["open", "closed"]


def ref_of(num: int) -> str:
    """The ref of a pull request."""
    return f"{PULL_REQUEST_PREFIX}{num}"


@router.get("")
def show_all(
    hub: HubOf,
    repository: Readable,
    type: Literal["all", "discussion", "pull_request"] = "all",
    status: Literal["all", "open", "closed"] = "all",
    author: str | None = None,
) -> Json:
    """The discussions, newest first. `huggingface_hub` reads pages; this is the only one."""
    wanted = select(table).where(table.c.repository_id == repository.id)
    if status != "all":
        wanted = wanted.where(table.c.status.in_(OPEN if status == "open" else CLOSED))
    if type != "all":
        wanted = wanted.where(table.c.base.is_(None) == (type == "discussion"))
    if author is not None:
        wanted = wanted.where(table.c.author == author)
    with hub.database.read() as connection:
        rows = connection.execute(wanted.order_by(table.c.num.desc())).all()
    shown = [_as_json(row, repository) for row in rows]
    return {"discussions": shown, "count": len(shown), "start": 0}


@router.get("/{num}")
def show(hub: HubOf, repository: Readable, num: Num, diff: bool = False) -> Json:
    with hub.database.read() as connection:
        discussion = find_discussion(connection, repository, num)
        of_discussion = events.c.discussion_id == discussion.id
        its = connection.execute(select(events).where(of_discussion).order_by(events.c.seq)).all()
    document = _as_json(discussion, repository)
    document["events"] = [_event_as_json(event) for event in its]
    if discussion.base is not None:
        document["changes"] = {"base": discussion.base, "mergeCommitId": discussion.merge_commit}
        document["filesWithConflicts"] = None  # not known before a merge, which names them
        if diff:
            document["diff"] = difference(repository, discussion.base, ref_of(num))
    return document


@router.post("")
def create(
    request: Request,
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewDiscussion, json_body(NewDiscussion)],
    repository: Locked,
) -> Json:
    made = open_discussion(
        hub.log,
        repository,
        identity,
        title=body.title,
        text=body.description,
        status="draft" if body.pullRequest else "open",
        base=DEFAULT_BRANCH if body.pullRequest else None,
    )
    return {
        "num": made.num,
        "pullRequest": body.pullRequest,
        "url": f"{hub_url(request)}/{repository.name.path}/discussions/{made.num}",
    }


@router.post("/{num}/comment")
def comment(
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewComment, json_body(NewComment)],
    repository: Locked,
    num: Num,
) -> Json:
    with hub.database.write() as connection:
        found = find_discussion(connection, repository, num)
        change = _Change(connection, hub.log, repository, identity.user)
        added = change.comment(found, body.comment)
    return {"newMessage": _event_as_json(added)}


@router.post("/{num}/status")
def set_status(
    hub: HubOf,
    identity: Writer,
    body: Annotated[NewStatus, json_body(NewStatus)],
    repository: Locked,
    num: Num,
) -> Json:
    with hub.database.write() as connection:
        change = _Change(connection, hub.log, repository, identity.user)
        changed = change.set_status(num, body.status, body.comment)
    return {"newStatus": _event_as_json(changed)}


@router.post("/{num}/merge")
def merge(
    hub: HubOf,
    identity: Writer,
    body: Annotated[Merge, json_body(Merge)],
    repository: Locked,
    num: Num,
) -> Json:
    """Merges a pull request: makes one commit of its changes, on the branch that it is for."""
    with hub.database.read() as connection:
        found = find_discussion(connection, repository, num)
    if found.base is None:
        raise BadRequest(
            f"Discussion {num} has no commits to merge: give the number of a pull request."
        )
    if found.status not in OPEN:
        raise Conflict(f"Pull request {num} is {found.status} already: merge an open one.")
    refs = read_refs(repository)
    if found.base not in refs or ref_of(num) not in refs:
        raise Conflict(
            f"{found.base} or {ref_of(num)} does not exist, so pull request {num} "
            "cannot be merged: open another one."
        )
    base, head = refs[found.base], refs[ref_of(num)]
    titles = ("--reverse", f"--max-count={MAX_TITLES}", "--format=- %s (%H)", f"{base}..{head}")
    listed = git(repository.folder, "log", *titles).decode(errors="replace")
    message = f"{found.title} (#{num})\n\n{listed}"
    commit = squash(repository, base, head, message=message, author=identity.signature)
    with hub.database.write() as connection:
        change = _Change(connection, hub.log, repository, identity.user)
        change.set_status(num, "merged", body.comment, commit)
        # The branch moves last, because the comment may be refused. If git fails, nothing is
        # stored. If the hub is killed before the transaction ends, the branch has the commit, and
        # the pull request stays open.
        git(repository.folder, "update-ref", found.base, commit, base)
    record_ref_changes(repository, hub.log)
    return {}


def open_discussion(
    log: EventLog,
    repository: Repository,
    identity: Identity,
    *,
    title: str,
    text: str,
    status: Status = "open",
    base: str | None,
    head: str | None = None,
) -> Row[Any]:
    """Opens a discussion, or a pull request for the branch `base`. The pull request's ref first
    points to the commit `head`, or to the newest commit of `base` if `head` is None. The caller
    holds the repository's lock. Raises BadRequest if the branch does not exist."""
    refs = read_refs(repository)
    if base is not None and base not in refs:
        raise BadRequest(f"The {repository.name} has no commit on {base}: push one first.")
    # Store the discussion before the ref exists. A ref without a discussion could never be deleted,
    # and would keep its commits from being purged. If the hub is killed or git fails before the ref
    # exists, the pull request has no commits: a person can push commits to it, or close it.
    with log.database.write() as connection:
        last = select(func.max(table.c.num)).where(table.c.repository_id == repository.id)
        num = (connection.scalar(last) or 0) + 1
        connection.execute(
            insert(table).values(
                id=token_hex(12),
                repository_id=repository.id,
                num=num,
                title=title,
                author=identity.user,
                status=status,
                base=base,
                created_at=time.time(),
            )
        )
        found = find_discussion(connection, repository, num)
        change = _Change(connection, log, repository, identity.user)
        change.comment(found, text, scope="discussion")
    if base is not None:
        git(repository.folder, "update-ref", ref_of(num), head or refs[base], NO_REF)
        record_ref_changes(repository, log)
    return found


@dataclass(frozen=True)
class _Change:
    """Changes a discussion in the caller's transaction, and stores the events."""

    connection: Connection
    log: EventLog
    repository: Repository
    author: str

    def comment(
        self, discussion: Row[Any], text: str, scope: str = "discussion.comment"
    ) -> Row[Any]:
        """Adds a comment, and returns its row. The event of a new discussion has the first comment
        and the scope `discussion`."""
        added = self._add(discussion, "comment", text)
        self._tell("create", scope, discussion, added)
        return added

    def set_status(
        self, num: int, status: Status, text: str | None, merge_commit: str | None = None
    ) -> Row[Any]:
        """Changes the status, and adds the comment `text`. The comment is an event of its own, so
        that a webhook which reads comments gets this one too. Raises Conflict if the pull request
        is merged, or the discussion has this status already."""
        found = find_discussion(self.connection, self.repository, num)
        if text:
            self.comment(found, text)
        if found.status == "merged":
            raise Conflict(
                f"Pull request {num} is merged, so its status cannot change: open a new pull "
                "request."
            )
        if found.status == status:
            raise Conflict(f"Discussion {num} is {status} already.")
        values = {"status": status, "merge_commit": merge_commit}
        self.connection.execute(update(table).where(table.c.id == found.id).values(values))
        changed = self._add(found, "status-change", status)
        after = find_discussion(self.connection, self.repository, num)
        self._tell("update", "discussion", after)
        return changed

    def _add(self, discussion: Row[Any], type: str, text: str) -> Row[Any]:
        values = {"type": type, "author": self.author, "created_at": time.time(), "text": text}
        added = insert(events).values(id=token_hex(12), discussion_id=discussion.id, **values)
        return self.connection.execute(added.returning(events)).one()

    def _tell(
        self,
        action: EventAction,
        scope: str,
        discussion: Row[Any],
        comment: Row[Any] | None = None,
    ) -> None:
        name, hub, page = self.repository.name, self.log.hub_url, f"discussions/{discussion.num}"
        web, api = f"{hub}/{name.path}/{page}", f"{hub}/api/{name.type}s/{name.id}/{page}"
        about: Json = {
            "id": discussion.id,
            "num": discussion.num,
            "title": discussion.title,
            "isPullRequest": discussion.base is not None,
            "status": discussion.status,
            "author": {"id": owner_id(discussion.author)},
            "url": {"web": web, "api": api},
        }
        if discussion.base is not None:
            merged = {"mergeCommitId": discussion.merge_commit} if discussion.merge_commit else {}
            about["changes"] = {"base": discussion.base, **merged}
        more: Json = {"discussion": about}
        if comment is not None:
            more["comment"] = {
                "id": comment.id,
                "author": {"id": owner_id(comment.author)},
                "hidden": False,
                "content": comment.text,
                "url": {"web": f"{web}#{comment.id}"},
            }
        event = Event(action=action, scope=scope, more=more)
        self.log.record(self.connection, self.repository, event)


def find_discussion(connection: Connection, repository: Repository, num: int) -> Row[Any]:
    """Raises NotFound."""
    of_repository = table.c.repository_id == repository.id
    row = connection.execute(select(table).where(of_repository, table.c.num == num)).one_or_none()
    if row is None:
        raise NotFound(
            f"The {repository.name} has no discussion and no pull request {num}: list them to find "
            "its number."
        )
    return row


def difference(repository: Repository, base: str, head: str) -> str:
    """The output of `git diff` from the last common commit of `base` and `head` to `head`, or a
    line that says why it is not shown."""
    # Into a file, because the difference of two datasets may be larger than the memory.
    with tempfile.TemporaryFile() as file:
        try:
            git(
                repository.folder,
                *("diff", "--no-ext-diff", "--no-color", f"{base}...{head}", "--"),
                into=file,
                seconds=MAX_SECONDS,
            )
        except HubError as error:
            logger.warning("the difference of a pull request is not shown: %s", error)
            return _NOT_SHOWN
        file.seek(0)
        text = file.read(MAX_DIFF_BYTES).decode(errors="replace")
        return text + _CUT if file.read(1) else text


def squash(repository: Repository, base: str, head: str, *, message: str, author: Signature) -> str:
    """Makes one commit on top of `base` that has all changes of the commits up to `head`, and
    returns its sha. Returns `base` if these commits change nothing.

    Raises Conflict if git cannot merge some files, and its message names them. Also raises it if
    git fails: the two may have no commit in common, git may need more than `MAX_SECONDS`, or it may
    be older than 2.38 and cannot merge without a work tree."""
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
    tree, *conflicts = output.decode(errors="replace").rstrip("\0").split("\0")
    if conflicts:
        raise Conflict(
            f"The pull request cannot be merged, because both sides changed "
            f"{', '.join(conflicts[:10])}: merge the branch into the pull request first."
        )
    if have_equal_files(repository, base, tree):
        return base
    return commit_tree(repository, tree, [base], message, author)


def _as_json(discussion: Row[Any], repository: Repository) -> Json:
    return {
        "num": discussion.num,
        "title": discussion.title,
        "status": discussion.status,
        "author": {"name": discussion.author, "type": "user"},
        "repo": {"name": repository.name.id, "type": repository.name.type},
        "isPullRequest": discussion.base is not None,
        "createdAt": iso_time(discussion.created_at),
        "pinned": False,
        "locked": False,
    }


def _event_as_json(event: Row[Any]) -> Json:
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
