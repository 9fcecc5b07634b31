"""Webhook management through the unmodified `HfApi`, and what a receiver is sent."""

from pathlib import Path

import pytest
from huggingface_hub.errors import HfHubHTTPError
from standardwebhooks import Webhook as Verifier

from receiver.payload import WebhookPayload
from tests.hub_fixtures import (
    Receiver,
    RunningHub,
    commit_file,
    push_file,
    recording_receiver,
    wait_until,
)
from tests.ports import free_port

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "dataset", "name": "local/facts"}]
SECRET = "whsec_c2VjcmV0IG9mIHRoZSB0ZXN0cw=="


def test_a_webhook_is_created_listed_changed_and_deleted(hub: RunningHub) -> None:
    api = hub.api
    created = api.create_webhook(url="http://127.0.0.1:9/x", watched=WATCHED, secret="s3cret")
    assert created.secret == "s3cret"
    assert (created.disabled, created.domains) == (False, ["repo", "discussion"])
    assert [(one.type, one.name) for one in created.watched] == [("dataset", "local/facts")]

    assert api.get_webhook(created.id).secret is None
    assert [(one.id, one.url, one.secret) for one in api.list_webhooks()] == [
        (created.id, "http://127.0.0.1:9/x", None)
    ]
    changed = api.update_webhook(created.id, url="http://127.0.0.1:9/y", domains=["repo"])
    assert (changed.url, changed.domains) == ("http://127.0.0.1:9/y", ["repo"])
    assert changed.watched == created.watched  # the client sent "watched": []
    changed = api.update_webhook(created.id, watched=[{"type": "org", "name": "team"}])
    assert [(one.type, one.name) for one in changed.watched] == [("org", "team")]
    assert changed.url == "http://127.0.0.1:9/y"

    assert api.disable_webhook(created.id).disabled
    assert not api.enable_webhook(created.id).disabled
    api.delete_webhook(created.id)
    assert api.list_webhooks() == []
    for act in (api.get_webhook, api.delete_webhook, api.disable_webhook):
        with pytest.raises(HfHubHTTPError) as error:
            act(created.id)
        assert error.value.response.status_code == 404


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"watched": WATCHED}, "url"),
        ({"url": "ftp://x/y", "watched": WATCHED}, "url"),
        ({"url": "http://", "watched": WATCHED}, "url"),
        ({"url": "http://xn--/", "watched": WATCHED}, "url"),
        ({"url": "http://x:99999/", "watched": WATCHED}, "url"),
        ({"url": "http://x/", "watched": []}, "watched"),
        ({"url": "http://x/", "watched": [{"type": "planet", "name": "x"}]}, "watched.0.type"),
        ({"url": "http://x/", "watched": WATCHED, "domains": ["weather"]}, "domains.0"),
        ({"url": "http://x/", "watched": WATCHED, "domains": []}, "domains"),
        ({"url": "http://x/", "watched": WATCHED, "secret": "two\nlines"}, "secret"),
        ({"url": "http://x/", "watched": WATCHED, "secret": "whsec_"}, "secret"),
        ({"jobSourceId": "1", "watched": WATCHED}, "no job '1'"),
    ],
)
def test_what_makes_no_webhook_is_refused(hub: RunningHub, body: object, named: str) -> None:
    answer = hub.request("POST", "/api/settings/webhooks", json=body)
    assert answer.status_code == 400
    assert named in answer.json()["error"]
    assert "lines" not in answer.text  # the secret


def test_secrets_for_a_job_are_refused(hub: RunningHub) -> None:
    body = {"jobSourceId": "j000001", "watched": WATCHED, "secrets": {"KEY": "v4lue"}}
    answer = hub.request("POST", "/api/settings/webhooks", json=body)
    assert answer.status_code == 501 and "v4lue" not in answer.text
    assert "set the variables there" in answer.json()["error"]


def test_a_webhook_is_not_left_without_a_domain(hub: RunningHub) -> None:
    id = hub.api.create_webhook(url="http://x/", watched=WATCHED).id
    with pytest.raises(HfHubHTTPError, match="domains: Tuple should have at least 1 item"):
        hub.api.update_webhook(id, domains=[])
    assert hub.api.get_webhook(id).domains == ["repo", "discussion"]


def test_a_watched_name_without_owner_is_the_hubs_owners(
    hub: RunningHub, receiver: Receiver, worktree: Path
) -> None:
    short, other = [{"type": "dataset", "name": "facts"}], [{"type": "user", "name": "other"}]
    created = hub.api.create_webhook(url=receiver.url, watched=short)
    changed = hub.api.create_webhook(url=receiver.url, watched=other)
    changed = hub.api.update_webhook(changed.id, watched=short)
    assert [[one.name for one in each.watched] for each in (created, changed)] == [
        ["local/facts"],
        ["local/facts"],
    ]
    push_file(hub, worktree, "a.txt", "1")
    assert {one.json["webhook"]["id"] for one in receiver.wait_for(2)} == {created.id, changed.id}


def test_the_default_branch_can_be_deleted_and_pushed_again(
    hub: RunningHub, receiver: Receiver, worktree: Path
) -> None:
    sha = push_file(hub, worktree, "a.txt", "1")
    hub.api.create_webhook(url=receiver.url, watched=WATCHED)
    hub.git("push", "-q", "origin", ":main", cwd=worktree)
    hub.git("push", "-q", "origin", "main", cwd=worktree)
    deleted, pushed = receiver.wait_for(2)
    ref = "refs/heads/main"
    assert deleted.json["updatedRefs"] == [{"ref": ref, "oldSha": sha, "newSha": None}]
    assert pushed.json["updatedRefs"] == [{"ref": ref, "oldSha": None, "newSha": sha}]


def test_the_payload_is_the_documented_one(
    hub: RunningHub, receiver: Receiver, worktree: Path
) -> None:
    created = hub.api.create_webhook(url=receiver.url, watched=WATCHED, secret=SECRET)
    sha = push_file(hub, worktree, "a.txt", "1")
    [received] = receiver.wait_for(1)
    repo = received.json["repo"]
    assert received.json == {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": {
            "type": "dataset",
            "name": "local/facts",
            "id": repo["id"],
            "private": True,
            "owner": {"id": repo["owner"]["id"]},
            "url": {
                "web": f"{hub.url}/datasets/local/facts",
                "api": f"{hub.url}/api/datasets/local/facts",
            },
            "headSha": sha,
        },
        "webhook": {"id": created.id, "version": 3},
        "updatedRefs": [{"ref": "refs/heads/main", "oldSha": None, "newSha": sha}],
    }
    payload = WebhookPayload.model_validate_json(received.body)
    assert payload.repo.head_sha == sha
    [delivery] = wait_until(
        lambda: [d for d in hub.deliveries(created.id) if d["status"] != "pending"]
    )
    assert received.headers["webhook-id"] == delivery["id"]
    assert received.headers["x-webhook-secret"] == SECRET
    Verifier(SECRET).verify(received.body, received.headers)
    assert delivery["status"] == "delivered"
    assert delivery["response_status"] == 200
    assert delivery["response_head"] == '{"ok": true}'
    assert delivery["milliseconds"] > 0


def test_without_a_secret_nothing_is_signed(
    hub: RunningHub, receiver: Receiver, worktree: Path
) -> None:
    hub.api.create_webhook(url=receiver.url, watched=WATCHED)
    push_file(hub, worktree, "a.txt", "1")
    [received] = receiver.wait_for(1)
    assert "x-webhook-secret" not in received.headers
    assert "webhook-signature" not in received.headers


def test_only_who_watches_is_told(hub: RunningHub, worktree: Path) -> None:
    watched = {
        "by name": [{"type": "dataset", "name": "local/facts"}],
        "by owner": [{"type": "user", "name": "local"}],
        "by org": [{"type": "org", "name": "local"}],
        "other type": [{"type": "model", "name": "local/facts"}],
        "other name": [{"type": "dataset", "name": "local/fact"}],
        "other owner": [{"type": "user", "name": "locals"}],
    }
    ids = {
        name: hub.api.create_webhook(url="http://127.0.0.1:9/", watched=items).id
        for name, items in watched.items()
    }
    ids["disabled"] = hub.api.create_webhook(url="http://127.0.0.1:9/", watched=WATCHED).id
    hub.api.disable_webhook(ids["disabled"])
    ids["discussions"] = hub.api.create_webhook(
        url="http://127.0.0.1:9/", watched=WATCHED, domains=["discussion"]
    ).id
    push_file(hub, worktree, "a.txt", "1")
    told = {name for name, id in ids.items() if hub.deliveries(id)}
    assert told == {"by name", "by owner", "by org"}


def test_an_answer_that_is_not_2xx_is_tried_again_under_the_same_id(
    hub: RunningHub, receiver: Receiver, webhook: str, worktree: Path
) -> None:
    receiver.answers = [(500, {}), (302, {"Location": receiver.url}), (200, {})]
    push_file(hub, worktree, "a.txt", "1")
    received = receiver.wait_for(3)
    [delivery] = wait_until(
        lambda: [d for d in hub.deliveries(webhook) if d["status"] != "pending"]
    )
    assert (delivery["status"], delivery["attempt"]) == ("delivered", 3)
    assert {one.headers["webhook-id"] for one in received} == {delivery["id"]}
    assert len({one.body for one in received}) == 1


def test_a_url_that_no_webhook_may_call_is_told_by_its_test(hub: RunningHub) -> None:
    created = hub.api.create_webhook(url="http://169.254.169.254/", watched=WATCHED)
    hub.request("POST", f"/api/settings/webhooks/{created.id}/test")
    [delivery] = wait_until(
        lambda: [each for each in hub.deliveries(created.id) if each["error"] is not None]
    )
    assert "169.254.169.254 is a link-local" in delivery["error"]


def test_a_receiver_that_hangs_delays_nobody_else(
    hub: RunningHub, receiver: Receiver, webhook: str, worktree: Path
) -> None:
    with recording_receiver() as quick:
        hub.api.create_webhook(url=quick.url, watched=WATCHED)
        receiver.hang.set()
        for number in range(3):
            push_file(hub, worktree, "a.txt", str(number))
        assert len(quick.wait_for(3, seconds=4)) == 3
        assert len(receiver.received) == 1
        receiver.hang.clear()
        receiver.wait_for(3)


def test_what_was_pending_waits_while_the_webhook_is_disabled(
    hub: RunningHub, worktree: Path
) -> None:
    port = free_port()
    id = hub.api.create_webhook(url=f"http://127.0.0.1:{port}/", watched=WATCHED).id
    push_file(hub, worktree, "a.txt", "1")
    hub.api.disable_webhook(id)
    with recording_receiver(port) as receiver:
        commit_file(hub, worktree, "a.txt", "2")
        hub.git("push", "-q", "origin", "main", cwd=worktree)  # tells nobody
        assert [one["status"] for one in hub.deliveries(id)] == ["pending"]
        hub.api.enable_webhook(id)
        receiver.wait_for(1)
        wait_until(lambda: [one["status"] for one in hub.deliveries(id)] == ["delivered"])
