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

from pydantic import BaseModel, ValidationError

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


class _Scope(BaseModel):
    scope: str


class _Scoped(BaseModel):
    event: _Scope


def _is_ping(body: bytes) -> bool:
    """Whether the body is the event that a hub sends to test a webhook."""
    if PING.encode() not in body:
        return False
    try:
        return _Scoped.model_validate_json(body).event.scope == PING
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
    """The fields that all senders send."""

    ref: str
    before: str
    after: str

    def to_payload(self, sender: PushSender) -> WebhookPayload:
        raise NotImplementedError

    def _payload(self, repo: Repo, sender: PushSender, branch: str | None) -> WebhookPayload:
        update = UpdatedRef(
            ref=self.ref, oldSha=_sha_or_none(self.before), newSha=_sha_or_none(self.after)
        )
        head = update.newSha if self.ref == f"refs/heads/{branch}" else None
        return WebhookPayload(
            event=Event(action="update", scope="repo.content"),
            repo=repo.model_copy(update={"headSha": head}),
            webhook=WebhookReference(id=sender, version=3),
            updatedRefs=(update,),
        )


class _Owner(BaseModel):
    login: str


class _Repository(BaseModel):
    id: int
    full_name: str
    private: bool
    html_url: str
    clone_url: str
    default_branch: str
    owner: _Owner


class _GitHubPush(_Push):
    """A push event of GitHub. Gitea sends the same fields.

    https://docs.github.com/webhooks/webhook-events-and-payloads#push
    """

    repository: _Repository

    def to_payload(self, sender: PushSender) -> WebhookPayload:
        repository = self.repository
        repo = Repo(
            type="dataset",
            name=repository.full_name,
            id=f"{sender}:{repository.id}",
            private=repository.private,
            owner=ObjectId(id=repository.owner.login),
            url=Url(web=repository.html_url, api=repository.clone_url),
        )
        return self._payload(repo, sender, repository.default_branch)


class _Project(BaseModel):
    path_with_namespace: str
    visibility_level: int
    web_url: str
    git_http_url: str
    default_branch: str | None = None


class _GitLabPush(_Push):
    """A push event of GitLab.

    https://docs.gitlab.com/user/project/integrations/webhook_events/#push-events
    """

    project_id: int
    project: _Project

    def to_payload(self, sender: PushSender) -> WebhookPayload:
        project = self.project
        repo = Repo(
            type="dataset",
            name=project.path_with_namespace,
            id=f"{sender}:{self.project_id}",
            private=project.visibility_level < 20,  # 20 means public
            owner=ObjectId(id=project.path_with_namespace.rpartition("/")[0]),
            url=Url(web=project.web_url, api=project.git_http_url),
        )
        return self._payload(repo, sender, project.default_branch)


def _sha_or_none(sha: str) -> str | None:
    """The sha, or None if the sha consists of zeros. Senders write zeros instead of a commit if the
    ref did not exist before the push, or if the push has deleted the ref."""
    return sha if sha.strip("0") else None
