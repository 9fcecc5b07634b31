"""Push events of other senders, as the Hub's payload."""

import json
from typing import Any
from urllib.parse import urlencode

import pytest

from receiver.errors import NotAnEvent
from receiver.payload import WebhookPayload
from receiver.verify import PushSender, read_event
from tests.receiver_payloads import (
    GITEA_PUSH,
    GITHUB_PUSH,
    GITLAB_PUSH,
    NEW,
    OLD,
    ZEROS,
    body_of,
)

HEADERS: dict[PushSender, dict[str, str]] = {
    "github": {"x-github-event": "push"},
    "gitea": {"x-gitea-event": "push", "x-github-event": "push"},
    "gitlab": {"x-gitlab-event": "Push Hook"},
}
PUSHES: dict[PushSender, dict[str, Any]] = {
    "github": GITHUB_PUSH,
    "gitea": GITEA_PUSH,
    "gitlab": GITLAB_PUSH,
}


@pytest.mark.parametrize("sender", ["github", "gitea"])
def test_a_push_may_come_in_a_form(sender: PushSender) -> None:
    push = {**PUSHES[sender], "note": "a+b & c = 100 % é"}
    form = urlencode({"payload": json.dumps(push), "another": "field"}).encode()
    headers = {**HEADERS[sender], "content-type": "application/x-www-form-urlencoded"}
    assert read_event(sender, headers, form) == read_event(sender, HEADERS[sender], body_of(push))
    with pytest.raises(NotAnEvent, match="push event"):
        read_event(sender, headers, b"payload=%ff%7b")


def read(sender: PushSender, **changes: Any) -> WebhookPayload:
    event = read_event(sender, HEADERS[sender], body_of(PUSHES[sender] | changes))
    assert isinstance(event, bytes)
    return WebhookPayload.model_validate_json(event)


@pytest.mark.parametrize(
    ("sender", "name", "ref", "clone_url", "head_sha", "is_private"),
    [
        (
            "github",
            "Codertocat/Hello-World",
            "refs/heads/main",
            "https://github.com/Codertocat/Hello-World.git",
            NEW,
            False,
        ),
        (
            "gitea",
            "gitea/webhooks",
            "refs/heads/develop",
            "http://localhost:3000/gitea/webhooks.git",
            None,
            True,
        ),
        (
            "gitlab",
            "mike/diaspora",
            "refs/heads/master",
            "http://example.com/mike/diaspora.git",
            NEW,
            True,
        ),
    ],
)
def test_a_push_is_an_update_of_content(
    sender: PushSender, name: str, ref: str, clone_url: str, head_sha: str | None, is_private: bool
) -> None:
    payload = read(sender)
    assert (payload.event.action, payload.event.scope) == ("update", "repo.content")
    assert payload.repo.name == name
    assert payload.repo.url.api == clone_url
    assert payload.repo.headSha == head_sha
    assert payload.repo.private == is_private
    assert payload.webhook.id == sender
    assert payload.updatedRefs is not None
    (update,) = payload.updatedRefs
    assert (update.ref, update.oldSha, update.newSha) == (ref, OLD, NEW)


@pytest.mark.parametrize("sender", ["github", "gitea", "gitlab"])
def test_zeros_are_no_commit(sender: PushSender) -> None:
    created, deleted = read(sender, before=ZEROS), read(sender, after=ZEROS)
    assert created.updatedRefs is not None
    assert created.updatedRefs[0].oldSha is None
    assert deleted.updatedRefs is not None
    assert deleted.updatedRefs[0].newSha is None


def test_a_tag_push_of_gitlab_is_a_push() -> None:
    body = body_of(GITLAB_PUSH | {"object_kind": "tag_push", "ref": "refs/tags/v1"})
    event = read_event("gitlab", {"x-gitlab-event": "Tag Push Hook"}, body)
    assert isinstance(event, bytes)
    assert b'"refs/tags/v1"' in event


def test_what_is_no_push_is_acknowledged() -> None:
    ping = read_event("github", {"x-github-event": "ping"}, b'{"zen": "Design for failure."}')
    assert ping == {"pong": True}
    issue = read_event("gitlab", {"x-gitlab-event": "Issue Hook"}, b"{}")
    assert issue == {"ignored": "the gitlab event 'Issue Hook' is not a push"}


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"ref": 1}'])
@pytest.mark.parametrize("sender", ["github", "gitea", "gitlab"])
def test_a_push_that_is_none(sender: PushSender, body: bytes) -> None:
    with pytest.raises(NotAnEvent, match=f"not a {sender} push event"):
        read_event(sender, HEADERS[sender], body)


def test_an_event_of_another_sender_is_refused() -> None:
    with pytest.raises(NotAnEvent, match="The header x-gitea-event is not set"):
        read_event("gitea", HEADERS["github"], body_of(GITHUB_PUSH))
