"""Composes what a receiver is sent, in the receiver's own record."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.hub.names import RepositoryName
from pipeline.hub.repositories import Repository
from receiver import payload as wire


@dataclass(frozen=True, kw_only=True)
class RefChange:
    """`old_sha` is None for a new ref, `new_sha` for a deleted one."""

    ref: str
    old_sha: str | None
    new_sha: str | None


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
) -> str:
    """The JSON of a `WebhookPayload`; keys without a value are left out, as the Hub does."""
    name = repository.name
    payload = wire.WebhookPayload(
        event=wire.Event(action=action, scope=scope),
        repo=wire.Repo(
            type=name.type,
            name=name.id,
            id=repository.id,
            private=repository.private,
            owner=wire.ObjectId(id=owner_id(name.owner)),
            url=wire.Url(web=f"{hub_url}/{name.path}", api=f"{hub_url}/api/{name.type}s/{name.id}"),
            headSha=head_sha,
        ),
        webhook=wire.WebhookReference(id=webhook_id, version=3),
        movedTo=None if moved_to is None else _moved_to(moved_to.name),
        updatedConfig=(
            wire.UpdatedConfig(private=repository.private) if scope == "repo.config" else None
        ),
    )
    document = payload.model_dump(mode="json", exclude_none=True)
    if changes:
        # Here a missing sha is said as null: it is how a new and a deleted ref are told.
        document["updatedRefs"] = [
            wire.UpdatedRef(
                ref=change.ref, oldSha=change.old_sha, newSha=change.new_sha
            ).model_dump(mode="json")
            for change in changes
        ]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _moved_to(name: RepositoryName) -> wire.MovedTo:
    return wire.MovedTo(name=name.id, owner=wire.ObjectId(id=owner_id(name.owner)))


def owner_id(owner: str) -> str:
    """24 hex digits, as the Hub's ids are; the same for an owner each time."""
    return hashlib.sha256(owner.encode()).hexdigest()[:24]
