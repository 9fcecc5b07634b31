"""Writes the JSON that a webhook's receiver gets: a `WebhookPayload` of `receiver/payload.py`."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.hub.discussions.store import Discussion, DiscussionEvent
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repository
from receiver import payload as wire


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a repository."""

    action: wire.EventAction
    scope: str = "repo"
    changes: Sequence[RefChange] = ()
    """The refs that a push moved."""
    moved_to: RepositoryName | None = None
    discussion: Discussion | None = None
    comment: DiscussionEvent | None = None
    """The first comment of a new `discussion`, or the comment that the event is about."""


def compose(
    event: Event, repository: Repository, *, webhook_id: str, hub_url: str, head_sha: str | None
) -> str:
    """The JSON of a `WebhookPayload`. As on the Hugging Face Hub, it has no key without a value."""
    name = repository.name
    web, api = f"{hub_url}/{name.path}", f"{hub_url}/api/{name.type}s/{name.id}"
    discussion, comment = None, None
    if event.discussion is not None:
        page = f"discussions/{event.discussion.num}"
        discussion = _discussion(event.discussion, f"{web}/{page}", f"{api}/{page}")
        comment = event.comment and _comment(event.comment, f"{web}/{page}")
    payload = wire.WebhookPayload(
        event=wire.Event(action=event.action, scope=event.scope),
        repo=wire.Repo(
            type=name.type,
            name=name.id,
            id=repository.id,
            private=repository.private,
            owner=_owner(name.owner),
            url=wire.Url(web=web, api=api),
            headSha=head_sha if discussion is None else None,
        ),
        webhook=wire.WebhookReference(id=webhook_id, version=3),
        movedTo=event.moved_to
        and wire.MovedTo(name=event.moved_to.id, owner=_owner(event.moved_to.owner)),
        updatedConfig=(
            wire.UpdatedConfig(private=repository.private) if event.scope == "repo.config" else None
        ),
        discussion=discussion,
        comment=comment,
    )
    document = payload.model_dump(mode="json", exclude_none=True)
    if event.changes:
        # Here a missing sha is written as null, which says that the ref is new or deleted.
        document["updatedRefs"] = [
            {"ref": change.ref, "oldSha": change.old_sha, "newSha": change.new_sha}
            for change in event.changes
        ]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _discussion(discussion: Discussion, web: str, api: str) -> wire.Discussion:
    changes = None
    if discussion.base is not None:
        changes = wire.Changes(base=discussion.base, mergeCommitId=discussion.merge_commit)
    return wire.Discussion(
        id=discussion.id,
        num=discussion.num,
        title=discussion.title,
        isPullRequest=discussion.is_pull_request,
        status=discussion.status,
        author=_owner(discussion.author),
        url=wire.Url(web=web, api=api),
        changes=changes,
    )


def _comment(comment: DiscussionEvent, discussion_url: str) -> wire.Comment:
    return wire.Comment(
        id=comment.id,
        author=_owner(comment.author),
        hidden=False,
        content=comment.text,
        url=wire.Url(web=f"{discussion_url}#{comment.id}"),
    )


def _owner(name: str) -> wire.ObjectId:
    return wire.ObjectId(id=owner_id(name))


def owner_id(owner: str) -> str:
    """The id of an owner: 24 hex digits, as on the Hugging Face Hub. It is computed from the name,
    so an owner always has the same id."""
    return hashlib.sha256(owner.encode()).hexdigest()[:24]
