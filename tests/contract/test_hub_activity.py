"""What a webhook was sent: over the API, and sent again."""

import json

import httpx
import pytest

from tests.hub_fixtures import Receiver, RunningHub, wait_until

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "user", "name": "local"}]


@pytest.fixture
def told(hub: RunningHub, receiver: Receiver) -> str:
    """The id of a webhook that was told of one new dataset."""
    id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
    hub.create_dataset("local/facts")
    settled(hub, id)
    return id


def settled(hub: RunningHub, id: str, status: str = "delivered") -> None:
    wait_until(lambda: {one["status"] for one in hub.deliveries(id)} == {status})


def test_a_replay_keeps_the_id_and_a_forced_one_names_the_old(
    hub: RunningHub, receiver: Receiver, told: str
) -> None:
    [first] = hub.deliveries(told)
    path = f"/api/settings/deliveries/{first['id']}"
    assert hub.request("POST", f"{path}/replay").json()["delivery"]["id"] == first["id"]
    receiver.wait_for(2)
    forced = hub.request("POST", f"{path}/replay?force=1").json()["delivery"]
    assert forced["id"] != first["id"]
    assert forced["replay_of"] == first["id"]
    received = receiver.wait_for(3)
    assert [one.headers["webhook-id"] for one in received] == [first["id"]] * 2 + [forced["id"]]
    assert [one.headers.get("webhook-replay-of") for one in received] == [None, None, first["id"]]
    assert len({one.body for one in received}) == 1
    settled(hub, told)
    assert {one["id"] for one in hub.deliveries(told)} == {first["id"], forced["id"]}
    assert hub.request("GET", path).json()["delivery"]["replay_of"] is None


def test_all_deliveries_are_listed_newest_first(hub: RunningHub, told: str) -> None:
    other = hub.api.create_webhook(url="http://127.0.0.1:9/", watched=WATCHED).id
    hub.create_dataset("local/more")
    found = hub.request("GET", "/api/settings/deliveries").json()
    assert sorted(one["webhook_id"] for one in found) == sorted([told, told, other])
    assert {one["repository"] for one in found[:2]} == {"dataset:local/more"}
    assert len(hub.request("GET", "/api/settings/deliveries?limit=1").json()) == 1
    path = f"/api/settings/webhooks/{told}/deliveries"
    assert hub.request("GET", f"{path}?status=lost").status_code == 400


@pytest.mark.parametrize(
    ("watched", "name"),
    [
        ({"type": "user", "name": "local"}, "local/ping"),
        ({"type": "dataset", "name": "team/answers"}, "team/answers"),
        ({"type": "space", "name": "team/app"}, "team/app"),
    ],
)
def test_a_test_reaches_its_webhook_only(
    hub: RunningHub, receiver: Receiver, watched: dict[str, str], name: str
) -> None:
    id = hub.api.create_webhook(url=receiver.url, watched=[watched], secret="s3cret").id
    other = hub.api.create_webhook(url=receiver.url, watched=[watched]).id
    hub.request("POST", f"/api/settings/webhooks/{id}/test").raise_for_status()
    [received] = receiver.wait_for(1)
    assert received.json["event"] == {"action": "update", "scope": "ping"}
    assert (received.json["repo"]["name"], received.json["webhook"]["id"]) == (name, id)
    assert received.headers["x-webhook-secret"] == "s3cret"
    settled(hub, id)
    assert hub.deliveries(other) == []


def test_a_disabled_webhook_is_sent_nothing_again_and_no_test(
    hub: RunningHub, receiver: Receiver, told: str
) -> None:
    [delivery] = hub.deliveries(told)
    hub.api.disable_webhook(told)
    base, id = "/api/settings", delivery["id"]
    for path in (
        f"{base}/webhooks/{told}/test",
        f"{base}/deliveries/{id}/replay",
        f"{base}/deliveries/{id}/replay?force=1",
    ):
        answer = hub.request("POST", path)
        assert answer.status_code == 400, path
        assert "enable it first" in answer.json()["error"]
    assert hub.deliveries(told) == [delivery]
    assert len(receiver.received) == 1


def test_a_page_of_another_site_changes_nothing_with_the_browsers_login(hub: RunningHub) -> None:
    """A page may post `text/plain` to any site; the hub reads it as JSON. Other headers that tell
    of a page: unit/receiver_server/test_listening.py."""
    path, headers = "/api/settings/webhooks", {"Origin": "https://evil.example"}
    content = json.dumps({"watched": WATCHED, "url": "http://127.0.0.1:9/"}).encode()
    plain = {"Content-Type": "text/plain"}
    # Basic authentication, as a browser has it.
    browser = httpx.Client(base_url=hub.url, auth=("me", hub.token))
    for answer in (
        browser.post(path, content=content, headers=plain | headers),
        hub.request("POST", path, content=content, headers=plain | headers),
    ):
        assert answer.status_code == 403
        assert "only this hub's own pages may change anything" in answer.json()["error"]
    assert browser.get(path, headers=headers).json() == []

    own = plain | {"Origin": hub.url, "Sec-Fetch-Site": "same-origin"}
    assert browser.post(path, content=content, headers=own).status_code == 200
    browser.close()
