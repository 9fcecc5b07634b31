"""Turns push events of GitHub, Gitea and GitLab into a `WebhookPayload`, the format of the Hugging
Face Hub.

The configured proof scheme, such as `github`, says how a sender proves that it sent an event. The
scheme also says which sender to expect. With the schemes `secret` and `standard-webhooks`, an event
must already be a `WebhookPayload`, and this module does not change the event.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from pydantic import AliasPath, BaseModel, Field, ValidationError, field_validator

from receiver.errors import NotAnEvent
from receiver.payload import (
    PING,
    Event,
    ObjectId,
    Repo,
    UpdatedRef,
    Url,
    WebhookPayload,
    WebhookReference,
)
from receiver.verify import ProofScheme


@dataclass(frozen=True)
class NotAPush:
    """An event for which no handler is called. The receiver sends `answer` to the sender."""

    answer: dict[str, str | bool]


def read_event(scheme: ProofScheme, headers: Mapping[str, str], body: bytes) -> bytes | NotAPush:
    """The event as the JSON of a `WebhookPayload`, or `NotAPush` if no handler is called for the
    event. Raises `NotAnEvent` if the body is not UTF-8. With the schemes `github`, `gitea` and
    `gitlab`, also raises `NotAnEvent` if the header with the event's name is missing, or if the
    body is not a push event in the sender's format."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NotAnEvent(f"The body is not UTF-8: {error.reason}.") from error
    if scheme == "secret" or scheme == "standard-webhooks":
        return NotAPush({"pong": True}) if _is_ping(body) else body
    header, push_names = _EVENT_HEADERS[scheme]
    name = headers.get(header)
    if name is None:
        raise NotAnEvent(
            f"The header {header} is not set, but this handler takes only {scheme} events. Check"
            " the `proof` of the handler."
        )
    if name == "ping":
        return NotAPush({"pong": True})
    if name not in push_names:
        return NotAPush({"ignored": f"the {scheme} event {name!r} is not a push"})
    body = _without_form(headers, body)
    try:
        push = (_GitLabPush if scheme == "gitlab" else _GitHubPush).model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise NotAnEvent(f"not a {scheme} push event: {where}: {first['msg']}") from error
    return push.to_payload(scheme).model_dump_json().encode()


def _without_form(headers: Mapping[str, str], body: bytes) -> bytes:
    """The JSON that the body contains. If a webhook is configured with the content type
    `application/x-www-form-urlencoded`, GitHub and Gitea send the JSON in the field `payload` of a
    form."""
    if not headers.get("content-type", "").startswith("application/x-www-form-urlencoded"):
        return body
    if not body.startswith(_FORM_FIELD):
        return body  # the header announces a form, but the body is probably JSON
    value = body.removeprefix(_FORM_FIELD).partition(b"&")[0]
    return unquote_to_bytes(value.replace(b"+", b" "))


class _Scoped(BaseModel):
    scope: str = Field(validation_alias=AliasPath("event", "scope"))


def _is_ping(body: bytes) -> bool:
    """Whether the body is the event that a hub sends to test a webhook."""
    if PING.encode() not in body:
        return False
    try:
        return _Scoped.model_validate_json(body).scope == PING
    except ValidationError:
        return False  # the body is malformed; the handler's route will refuse it


_FORM_FIELD = b"payload="

PushSender = Literal["github", "gitea", "gitlab"]

_EVENT_HEADERS: dict[PushSender, tuple[str, tuple[str, ...]]] = {
    "github": ("x-github-event", ("push",)),
    "gitea": ("x-gitea-event", ("push",)),
    "gitlab": ("x-gitlab-event", ("Push Hook", "Tag Push Hook")),
}


class _Push(BaseModel):
    """What a push event says, whoever sends it."""

    ref: str
    before: str
    after: str
    id: int
    name: str
    web_url: str
    git_url: str
    default_branch: str | None = None
    is_private: bool

    def to_payload(self, sender: PushSender) -> WebhookPayload:
        update = UpdatedRef(
            ref=self.ref, oldSha=_sha_or_none(self.before), newSha=_sha_or_none(self.after)
        )
        return WebhookPayload(
            event=Event(action="update", scope="repo.content"),
            repo=Repo(
                type="dataset",
                name=self.name,
                id=f"{sender}:{self.id}",
                private=self.is_private,
                owner=ObjectId(id=self.name.rpartition("/")[0]),
                url=Url(web=self.web_url, api=self.git_url),
                headSha=update.newSha if self.ref == f"refs/heads/{self.default_branch}" else None,
            ),
            webhook=WebhookReference(id=sender, version=3),
            updatedRefs=(update,),
        )


class _GitHubPush(_Push):
    """A push event of GitHub. Gitea sends the same fields.

    https://docs.github.com/webhooks/webhook-events-and-payloads#push
    """

    id: int = Field(validation_alias=AliasPath("repository", "id"))
    name: str = Field(validation_alias=AliasPath("repository", "full_name"))
    web_url: str = Field(validation_alias=AliasPath("repository", "html_url"))
    git_url: str = Field(validation_alias=AliasPath("repository", "clone_url"))
    default_branch: str = Field(validation_alias=AliasPath("repository", "default_branch"))
    is_private: bool = Field(validation_alias=AliasPath("repository", "private"))


class _GitLabPush(_Push):
    """A push event of GitLab.

    https://docs.gitlab.com/user/project/integrations/webhook_events/#push-events
    """

    id: int = Field(validation_alias="project_id")
    name: str = Field(validation_alias=AliasPath("project", "path_with_namespace"))
    web_url: str = Field(validation_alias=AliasPath("project", "web_url"))
    git_url: str = Field(validation_alias=AliasPath("project", "git_http_url"))
    default_branch: str | None = Field(
        None, validation_alias=AliasPath("project", "default_branch")
    )
    is_private: bool = Field(validation_alias=AliasPath("project", "visibility_level"))

    @field_validator("is_private", mode="before")
    @classmethod
    def _is_private(cls, visibility_level: object) -> bool:
        return visibility_level != 20  # which means public


def _sha_or_none(sha: str) -> str | None:
    """The sha, or None if the sha consists of zeros. Senders write zeros instead of a commit if the
    ref did not exist before the push, or if the push has deleted the ref."""
    return sha if sha.strip("0") else None
