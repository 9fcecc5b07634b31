"""`WebhookPayload`, version 3: what a hub sends when a repository changes.

Names are the wire's own, so that a handler reads `payload.updatedRefs` as the Hub documents it
(https://huggingface.co/docs/hub/webhooks). Fields that are not listed here are ignored.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

EventAction = Literal["create", "delete", "move", "update"]
RepoType = Literal["bucket", "dataset", "model", "space"]
PING = "ping"
"""The scope of an event that says nothing but that a webhook works; no handler sees it."""
DiscussionStatus = Literal["closed", "draft", "merged", "open"]


class _Wire(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ObjectId(_Wire):
    id: str


class Url(_Wire):
    web: str
    api: str | None = None


class Event(_Wire):
    action: EventAction
    scope: str
    """`repo`, `repo.content`, `repo.config`, `discussion`, `discussion.comment`, or narrower."""


class Repo(_Wire):
    type: RepoType
    name: str
    """`owner/name`"""
    id: str
    private: bool
    owner: ObjectId
    url: Url
    headSha: str | None = None
    """Head of the default branch after the event; sent for `repo*` scopes only."""
    subdomain: str | None = None
    tags: tuple[str, ...] | None = None

    @property
    def head_sha(self) -> str | None:
        """`headSha`, under the name that huggingface_hub's model gives it."""
        return self.headSha


class UpdatedRef(_Wire):
    ref: str
    """In full, as in `refs/heads/main`."""
    oldSha: str | None = None
    """None for a ref that is new."""
    newSha: str | None = None
    """None for a ref that is deleted."""


class Webhook(_Wire):
    id: str
    version: Literal[3]


class MovedTo(_Wire):
    name: str
    owner: ObjectId


class UpdatedConfig(_Wire):
    private: bool | None = None


class Changes(_Wire):
    base: str
    mergeCommitId: str | None = None


class Discussion(_Wire):
    id: str
    num: int
    title: str
    isPullRequest: bool
    status: DiscussionStatus
    author: ObjectId
    url: Url
    changes: Changes | None = None
    pinned: bool | None = None


class Comment(_Wire):
    id: str
    author: ObjectId
    hidden: bool
    url: Url
    content: str | None = None


class WebhookPayload(_Wire):
    event: Event
    repo: Repo
    webhook: Webhook
    updatedRefs: tuple[UpdatedRef, ...] | None = None
    updatedConfig: UpdatedConfig | None = None
    """Sent for the scope `repo.config`."""
    updatedFiles: tuple[JsonValue, ...] | None = None
    """Sent for buckets, as they come."""
    discussion: Discussion | None = None
    comment: Comment | None = None
    movedTo: MovedTo | None = None
