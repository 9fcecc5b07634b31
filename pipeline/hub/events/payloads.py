"""Writes the JSON that a webhook's receiver gets: a `WebhookPayload` of `receiver/payload.py`."""

import hashlib
import json
from collections.abc import Sequence

from pipeline.hub.discussions.store import Discussion, DiscussionEvent
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repository
from receiver import payload as wire


def compose(
    *,
    action: wire.EventAction,
    scope: str,
    repository: Repository,
    webhook_id: str,
    hub_url: str,
    head_sha: str | None = None,
    changes: Sequence[RefChange] = (),
    moved_to: Repository | None = None,
    discussion: Discussion | None = None,
    comment: DiscussionEvent | None = None,
) -> str:
    """The JSON of a `WebhookPayload`. As on the Hugging Face Hub, it has no key without a value."""
    name = repository.name
    web, api = f"{hub_url}/{name.path}", f"{hub_url}/api/{name.type}s/{name.id}"
    payload = wire.WebhookPayload(
        event=wire.Event(action=action, scope=scope),
        repo=wire.Repo(
            type=name.type,
            name=name.id,
            id=repository.id,
            private=repository.private,
            owner=wire.ObjectId(id=owner_id(name.owner)),
            url=wire.Url(web=web, api=api),
            headSha=head_sha,
        ),
        webhook=wire.WebhookReference(id=webhook_id, version=3),
        movedTo=None if moved_to is None else _moved_to(moved_to.name),
        updatedConfig=(
            wire.UpdatedConfig(private=repository.private) if scope == "repo.config" else None
        ),
        discussion=None if discussion is None else _discussion(discussion, web, api),
        comment=(
            None
            if discussion is None or comment is None
            else _comment(comment, f"{web}/discussions/{discussion.num}")
        ),
    )
    document = payload.model_dump(mode="json", exclude_none=True)
    if changes:
        # Here a missing sha is written as null, which says that the ref is new or deleted.
        document["updatedRefs"] = [
            wire.UpdatedRef(
                ref=change.ref, oldSha=change.old_sha, newSha=change.new_sha
            ).model_dump(mode="json")
            for change in changes
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
        author=wire.ObjectId(id=owner_id(discussion.author)),
        url=wire.Url(
            web=f"{web}/discussions/{discussion.num}", api=f"{api}/discussions/{discussion.num}"
        ),
        changes=changes,
    )


def _comment(comment: DiscussionEvent, discussion_url: str) -> wire.Comment:
    history = comment.data["history"]
    assert isinstance(history, list)
    return wire.Comment(
        id=comment.id,
        author=wire.ObjectId(id=owner_id(comment.author)),
        hidden=False,
        content=history[-1]["raw"],
        url=wire.Url(web=f"{discussion_url}#{comment.id}"),
    )


def _moved_to(name: RepositoryName) -> wire.MovedTo:
    return wire.MovedTo(name=name.id, owner=wire.ObjectId(id=owner_id(name.owner)))


def owner_id(owner: str) -> str:
    """The id of an owner: 24 hex digits, as on the Hugging Face Hub. It is computed from the name,
    so an owner always has the same id."""
    return hashlib.sha256(owner.encode()).hexdigest()[:24]
