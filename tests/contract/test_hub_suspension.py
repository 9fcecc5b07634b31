"""A webhook that keeps failing is suspended, loses nothing, and comes back by itself."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from receiver.webhooks import get_webhook
from tests.hub_fixtures import (
    Receiver,
    RunningHub,
    running_hub,
    wait_until,
)

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "user", "name": "local"}]


@contextmanager
def hub_in(folder: Path, *delivery_schedule_seconds: float) -> Iterator[RunningHub]:
    """Its webhooks are suspended after their first failure."""
    settings: dict[str, Any] = {"delivery_schedule_seconds": delivery_schedule_seconds}
    with running_hub(folder / "hub", suspend_after_seconds=0, **settings) as hub:
        yield hub


def status(hub: RunningHub, id: str) -> str:
    return get_webhook(id, endpoint=hub.url, token=hub.token).status


def states(hub: RunningHub, id: str) -> list[str]:
    """Of the deliveries, oldest event first."""
    return [one["status"] for one in reversed(hub.deliveries(id))]


def told(receiver: Receiver) -> list[str]:
    """The datasets whose creation was delivered, in the order of their first 2xx answer."""
    return [one.json["repo"]["name"] for one in receiver.received]


def test_a_failing_webhook_is_suspended_and_resumes_without_a_loss(
    receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [(503, {})] * 10_000
    with (
        caplog.at_level(logging.INFO, "pipeline.hub.deliveries"),
        hub_in(tmp_path, 0, *[0.05] * 1000) as hub,
    ):
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
        hub.create_dataset("local/a")
        wait_until(lambda: status(hub, id) == "suspended")
        assert not hub.api.get_webhook(id).disabled  # the client has no word for it
        for name in "bcd":
            hub.create_dataset(f"local/{name}")
        receiver.wait_for(len(receiver.received) + 5)
        # Only the head is tried, so the others wait in their order.
        assert set(told(receiver)) == {"local/a"}
        assert states(hub, id) == ["pending"] * 4
        receiver.received.clear()
        receiver.answers = []
        receiver.wait_for(4)
        assert told(receiver) == [f"local/{name}" for name in "abcd"]
        wait_until(lambda: states(hub, id) == ["delivered"] * 4)
        assert status(hub, id) == "enabled"
    messages = [(record.levelname, record.getMessage()) for record in caplog.records]
    for level, words in (("ERROR", "SUSPENDED"), ("INFO", "answers again")):
        assert any(at == level and id in said and words in said for at, said in messages)


def test_what_used_up_its_schedule_is_dead_for_itself_alone(
    receiver: Receiver, tmp_path: Path
) -> None:
    with hub_in(tmp_path, 0, 0.01, 0.01) as hub:
        receiver.answers = [(503, {})] * 3
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
        hub.create_dataset("local/a")
        wait_until(lambda: states(hub, id) == ["dead"])
        assert status(hub, id) == "suspended"
        hub.create_dataset("local/b")
        wait_until(lambda: states(hub, id) == ["dead", "delivered"])
        assert status(hub, id) == "enabled"


def test_another_secret_ends_a_suspension(receiver: Receiver, tmp_path: Path) -> None:
    with hub_in(tmp_path, 0, 60, 60) as hub:
        receiver.answers = [(403, {})] * 2
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED, secret="wrong").id
        hub.create_dataset("local/a")
        wait_until(lambda: status(hub, id) == "suspended")
        hub.api.enable_webhook(id)
        receiver.wait_for(2)  # at once
        wait_until(lambda: status(hub, id) == "suspended")
        hub.api.update_webhook(id, domains=["repo"])
        assert status(hub, id) == "suspended", "nothing that the receiver sees has changed"
        hub.api.update_webhook(id, secret="right")
        assert receiver.wait_for(3)[2].headers["x-webhook-secret"] == "right"
        wait_until(lambda: states(hub, id) == ["delivered"])
        assert status(hub, id) == "enabled"
