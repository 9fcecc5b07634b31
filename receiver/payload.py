"""`WebhookPayload`: what a hub sends when a repository changes (payload version 3).

https://huggingface.co/docs/hub/webhooks documents the JSON. The attributes have the names of the
JSON's fields, such as `payload.updatedRefs`. Fields that are not declared here are ignored. A field
is None if the hub did not send it.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

EventAction = Literal["create", "delete", "move", "update"]
"""The actions that the stack's own hub sends."""
PING = "ping"
"""The scope of an event that only tests whether a webhook works. The receiver answers such an event
itself, without calling a handler."""


class _HubRecord(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class ObjectId(_HubRecord):
    id: str


class Url(_HubRecord):
    web: str
    api: str | None = None


class Event(_HubRecord):
    action: str
    """`create`, `delete`, `move` or `update`. A newer hub may send another one, and also other
    values of the fields `type`, `status` and `version` below."""
    scope: str
    """`repo`, `repo.content`, `repo.config`, `discussion`, `discussion.comment`, or a narrower
    scope such as `repo.config.dois`."""


class Repo(_HubRecord):
    type: str
    """`bucket`, `dataset`, `model` or `space`."""
    name: str
    """`owner/name`"""
    id: str
    private: bool
    owner: ObjectId
    url: Url
    headSha: str | None = None
    """The head commit of the default branch after the event. Sent only if the event's scope begins
    with `repo`."""
    subdomain: str | None = None
    tags: tuple[str, ...] | None = None

    @property
    def head_sha(self) -> str | None:
        """The same as `headSha`. huggingface_hub uses this name."""
        return self.headSha


class UpdatedRef(_HubRecord):
    ref: str
    """The full name, such as `refs/heads/main`."""
    oldSha: str | None = None
    """The commit before the event. None for a new ref."""
    newSha: str | None = None
    """The commit after the event. None for a deleted ref."""


class WebhookReference(_HubRecord):
    id: str
    version: int


class MovedTo(_HubRecord):
    name: str
    owner: ObjectId


class UpdatedConfig(_HubRecord):
    private: bool | None = None


class Changes(_HubRecord):
    base: str
    mergeCommitId: str | None = None


class Discussion(_HubRecord):
    id: str
    num: int
    title: str
    isPullRequest: bool
    status: str
    """`closed`, `draft`, `merged` or `open`."""
    author: ObjectId
    url: Url
    changes: Changes | None = None
    pinned: bool | None = None


class Comment(_HubRecord):
    id: str
    author: ObjectId
    hidden: bool
    url: Url
    content: str | None = None


class WebhookPayload(_HubRecord):
    event: Event
    repo: Repo
    webhook: WebhookReference
    updatedRefs: tuple[UpdatedRef, ...] | None = None
    updatedConfig: UpdatedConfig | None = None
    """The changed settings of the repository. Sent for the scope `repo.config`."""
    updatedFiles: tuple[JsonValue, ...] | None = None
    """The changed files of a bucket. Sent only for buckets. The items are passed on as they are."""
    discussion: Discussion | None = None
    comment: Comment | None = None
    movedTo: MovedTo | None = None
