"""Whatever goes wrong with one delivery is an attempt that failed: no attempt is made for ever."""

import contextlib
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.job import seal
from pipeline.hub import deliveries, webhooks
from tests.hub_fixtures import SECRET_KEY, Receiver, RunningHub, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "user", "name": "local"}]


def dead(hub: RunningHub, id: str) -> dict[str, Any]:
    """The webhook's one delivery, when it is given up."""
    [found] = wait_until(lambda: [one for one in hub.deliveries(id) if one["status"] == "dead"])
    delivery: dict[str, Any] = found
    return delivery


def test_a_failure_at_an_old_url_holds_up_nothing_at_the_new_one(
    receiver: Receiver, tmp_path: Path
) -> None:
    receiver.answers = [(503, {})]
    receiver.hang.set()
    with running_hub(
        tmp_path / "hub", delivery_timeout_seconds=60, delivery_schedule_seconds=(0, 36_000)
    ) as hub:
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
        hub.create_dataset("local/facts")
        receiver.wait_for(1)
        hub.api.update_webhook(id, url=f"{receiver.url}/new")
        receiver.hang.clear()
        wait_until(lambda: hub.deliveries(id)[0]["status"] == "delivered")
        [facts] = hub.deliveries(id)
    assert facts["attempt"] == 2
    assert [one.path.endswith("/new") for one in receiver.received] == [False, True]


def test_a_hanging_receiver_is_given_up_after_the_timeout(
    receiver: Receiver, tmp_path: Path
) -> None:
    with running_hub(
        tmp_path / "hub", delivery_schedule_seconds=(0, 0), delivery_timeout_seconds=0.2
    ) as hub:
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
        receiver.hang.set()
        hub.create_dataset("local/facts")
        found = dead(hub, id)
        assert (found["error"], found["response_status"]) == ("no answer within 0.2 s", None)


# Neither can be stored any more; both raise where nobody foresaw it.
@pytest.mark.parametrize(
    ("column", "value"),
    [("url", "http://xn--/"), ("encrypted_secret", seal({"WEBHOOK_SECRET": "whsec_"}, SECRET_KEY))],
    ids=["a-host-in-no-script", "a-secret-without-a-key"],
)
def test_what_nobody_foresaw_uses_up_attempts_and_is_logged(
    hub: RunningHub, caplog: pytest.LogCaptureFixture, column: str, value: str | bytes
) -> None:
    id = hub.api.create_webhook(url="http://127.0.0.1:9/", watched=WATCHED).id
    with contextlib.closing(sqlite3.connect(hub.root / "hub.sqlite")) as connection, connection:
        connection.execute(f"UPDATE webhooks SET {column} = ?", (value,))
    hub.create_dataset("local/facts")
    found = dead(hub, id)
    assert (found["attempt"], found["response_status"]) == (4, None)
    assert "its log says where" in found["error"]
    logged = [one for one in caplog.records if one.exc_info]
    assert len(logged) == 4 and all(found["id"] in one.getMessage() for one in logged)


def fails_once(act: Callable[..., Any]) -> Callable[..., Any]:
    errors = [RuntimeError("nobody foresaw it")]

    def call(*arguments: Any) -> Any:
        if errors:
            raise errors.pop()
        return act(*arguments)

    return call


def test_what_nobody_foresaw_stops_no_worker_and_repeats_no_attempt(
    hub: RunningHub, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
    monkeypatch.setattr(deliveries, "BROKEN_OFF_SECONDS", 0.01)
    for name in ("queues", "oldest_pending", "settle"):
        monkeypatch.setattr(webhooks, name, fails_once(getattr(webhooks, name)))
    hub.create_dataset("local/facts")
    wait_until(lambda: [one["status"] for one in hub.deliveries(id)] == ["delivered"])
    assert (len(receiver.received), hub.deliveries(id)[0]["attempt"]) == (1, 1)
    metrics = hub.request("GET", "/metrics").text
    for worker, count in (("dispatcher", 1.0), ("webhook", 2.0)):
        assert f'hub_worker_failures_total{{worker="{worker}"}} {count}' in metrics
