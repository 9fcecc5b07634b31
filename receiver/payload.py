"""`WebhookPayload`, version 3: what a hub sends when a repository changes.

Fields have the same names as in the JSON, which https://huggingface.co/docs/hub/webhooks documents.
For example, a handler reads `payload.updatedRefs`. Fields of the JSON that are not named here are
ignored.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

EventAction = Literal["create", "delete", "move", "update"]
RepoType = Literal["bucket", "dataset", "model", "space"]
PING = "ping"
"""The scope of an event that only tests whether a webhook works. Such an event reaches no
handler."""
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
    """`repo`, `repo.content`, `repo.config`, `discussion`, `discussion.comment`, or a sub-scope."""


class Repo(_Wire):
    type: RepoType
    name: str
    """`owner/name`"""
    id: str
    private: bool
    owner: ObjectId
    url: Url
    headSha: str | None = None
    """The head commit of the default branch after the event. Sent for `repo*` scopes only."""
    subdomain: str | None = None
    tags: tuple[str, ...] | None = None

    @property
    def head_sha(self) -> str | None:
        """`headSha`, under the name that huggingface_hub uses."""
        return self.headSha


class UpdatedRef(_Wire):
    ref: str
    """The full name, such as `refs/heads/main`."""
    oldSha: str | None = None
    """None for a new ref."""
    newSha: str | None = None
    """None for a deleted ref."""


class WebhookReference(_Wire):
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
    webhook: WebhookReference
    updatedRefs: tuple[UpdatedRef, ...] | None = None
    updatedConfig: UpdatedConfig | None = None
    """Sent for the scope `repo.config`."""
    updatedFiles: tuple[JsonValue, ...] | None = None
    """Sent for buckets; not checked here."""
    discussion: Discussion | None = None
    comment: Comment | None = None
    movedTo: MovedTo | None = None


_FIXED_VALUES: dict[tuple[str, ...], type] = {
    ("event", "action"): str,
    ("repo", "type"): str,
    ("discussion", "status"): str,
    ("webhook", "version"): int,
}


def unknown_value(errors: Iterable[Mapping[str, Any]]) -> str | None:
    """A newer hub may send a value that this receiver does not know. Returns the field and this
    value. None if there is no such value; the payload is then malformed.

    `errors` are the errors of the request's validation. If one value is new, other fields may have
    changed together with it, so errors about other fields do not count.
    """
    for error in errors:
        field = tuple(error["loc"][1:])  # the first part is "body"
        # Compare types with `is`: for `isinstance`, True would be an int.
        if error["type"] == "literal_error" and type(error["input"]) is _FIXED_VALUES.get(field):
            return f"{'.'.join(field)} {error['input']!r:.200}"
    return None
