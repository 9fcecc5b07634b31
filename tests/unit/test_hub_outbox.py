"""When a delivery is tried again, when it is given up, and how long it is kept."""

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import Row, func, select, update

from pipeline.hub import database as tables
from pipeline.hub import webhooks
from pipeline.hub.database import Database, open_database
from pipeline.hub.events import Event, EventLog
from pipeline.hub.repositories import RepositoryName
from pipeline.hub.routes.webhooks import WebhookRequest, create_webhook
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import (
    Attempt,
    HubWatchedItem,
    StoredWebhook,
    change_webhook,
    get_webhook,
    replay,
)
from tests.hub_fixtures import add_row

DAY = 86400.0


class Kept:
    """An outbox with one delivery, as old as a test makes it."""

    def __init__(self, folder: Path) -> None:
        self.database: Database = open_database(folder)
        self._log = EventLog(database=self.database, hub_url="http://hub")
        name = RepositoryName(type="dataset", owner="local", name="facts")
        watched = (HubWatchedItem(type="dataset", name="local/facts"),)
        request = WebhookRequest(url="http://127.0.0.1:9/", watched=watched)
        with self.database.write() as connection:
            self._repository = add_row(connection, folder, name)
            self._id = create_webhook(connection, request, Fernet.generate_key()).id
        self.record()

    def record(self) -> None:
        """One more delivery, due at once."""
        with self.database.write() as connection:
            self._log.record(connection, self._repository, Event(action="create"))

    def change(self, **columns: object) -> None:
        with self.database.write() as connection:
            connection.execute(update(tables.deliveries).values(**columns))

    def webhook(self) -> StoredWebhook:
        with self.database.read() as connection:
            return get_webhook(connection, self._id)

    def send(self, attempt: Attempt, **settings: object) -> StoredWebhook:
        """The webhook after the head of its queue was sent, and that ended so."""
        told = HubSettings.model_validate(settings)
        with self.database.write() as connection:
            head = webhooks.oldest_pending(connection, self._id)
            assert head is not None
            webhooks.settle(connection, *head, attempt, told)
            return get_webhook(connection, self._id)

    def head(self) -> str:
        """The id of the head of the queue."""
        with self.database.read() as connection:
            head = webhooks.oldest_pending(connection, self._id)
        assert head is not None
        return head[0].id

    def deliveries(self) -> list[Row[Any]]:
        """Newest first."""
        newest_first = select(tables.deliveries).order_by(tables.deliveries.c.event_seq.desc())
        with self.database.read() as connection:
            return list(connection.execute(newest_first))


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.database.close()


REFUSED = Attempt(started_at=time.time(), milliseconds=1, error="refused", refused=True)


def test_refused_connections_use_up_no_attempt_and_are_tried_less_often(kept: Kept) -> None:
    waits = []
    for seconds in (0, 1, 3, 10, 200_000):
        attempt = replace(REFUSED, started_at=1e9 + seconds)
        webhook = kept.send(attempt, suspend_after_seconds=10)
        assert webhook.retry_at is not None
        waits.append(webhook.retry_at - time.time())
    assert waits == pytest.approx([0.5, 1, 3, 5, 5], abs=0.3)
    assert webhook.status == "suspended"
    [delivery] = kept.deliveries()
    assert (delivery.status, delivery.attempt) == ("pending", 0)


TAKEN = Attempt(started_at=time.time(), milliseconds=1, response_status=200)


def failed(seconds: float) -> Attempt:
    """At this time after the first one."""
    return Attempt(started_at=1e9 + seconds, milliseconds=1, response_status=500)


@pytest.mark.parametrize("attempt", [TAKEN, failed(0), REFUSED])
def test_a_replay_during_the_last_attempt_makes_it_pending(kept: Kept, attempt: Attempt) -> None:
    kept.change(queued_at=time.time() - DAY)
    with kept.database.write() as connection:
        found = webhooks.oldest_pending(connection, kept.webhook().id)
        assert found is not None
        replay(connection, found[0].id)
        webhooks.settle(connection, *found, attempt, HubSettings(delivery_schedule_seconds=(0,)))
    [stored] = kept.deliveries()
    assert (stored.status, stored.attempt, stored.last_attempt_at) == ("pending", 0, None)
    assert kept.webhook().status == "enabled"


def test_each_wait_is_the_schedules(kept: Kept) -> None:
    for number, seconds in enumerate((5, 30, 120, 600, 1800, *[3600] * 24)):
        webhook = kept.send(failed(number))
        assert webhook.retry_at is not None
        assert webhook.retry_at - time.time() == pytest.approx(seconds, abs=0.3)
    with kept.database.read() as connection:
        assert webhooks.queues(connection) == {webhook.id: webhook.retry_at}


def test_a_suspension_goes_by_time_and_its_probe_is_the_head(kept: Kept) -> None:
    """Deliveries 1 to 4 arrive in this order, however many wait and however they fail."""
    for _ in range(3):
        kept.record()
    order = [one.id for one in reversed(kept.deliveries())]
    assert kept.send(failed(0)).status == "enabled"
    assert kept.send(failed(299)).status == "enabled"
    assert kept.send(failed(300)).status == "suspended"
    taken = []
    for _ in range(4):
        taken.append(kept.head())
        assert kept.send(TAKEN).status == "enabled"
    assert taken == order


def test_a_replay_goes_at_once_and_before_what_is_newer(kept: Kept) -> None:
    kept.send(TAKEN)
    [first] = kept.deliveries()
    kept.record()
    assert kept.send(failed(0)).retry_at is not None
    with kept.database.write() as connection:
        replay(connection, first.id)
    assert kept.head() == first.id and kept.webhook().retry_at is None


OLD = time.time() - 31 * DAY


@pytest.mark.parametrize(
    ("status", "days_ago", "is_pruned"),
    [
        ("delivered", 31, True),
        ("dead", 31, True),
        ("delivered", 29, False),
        ("dead", 29, False),
        ("pending", 31, False),
        ("pending", None, False),
    ],
)
def test_what_ended_a_month_ago_goes(
    kept: Kept, status: str, days_ago: int | None, is_pruned: bool
) -> None:
    last_attempt_at = None if days_ago is None else time.time() - days_ago * DAY
    kept.change(status=status, created_at=OLD, queued_at=OLD, last_attempt_at=last_attempt_at)
    webhooks.prune(kept.database, 30)
    assert (kept.deliveries() == []) == is_pruned


def test_events_go_with_their_deliveries(kept: Kept) -> None:
    kept.change(status="delivered", created_at=OLD, queued_at=OLD, last_attempt_at=OLD)
    kept.record()
    with kept.database.write() as connection:
        connection.execute(update(tables.events).values(created_at=OLD))
    webhooks.prune(kept.database, 30)
    with kept.database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(tables.events)) == 1
    assert [one.status for one in kept.deliveries()] == ["pending"]


def test_a_person_and_a_410_disable_and_a_restart_ends_a_suspension(kept: Kept) -> None:
    def restart(**how: bool) -> str:
        with kept.database.write() as connection:
            webhook = get_webhook(connection, kept.webhook().id)
            change_webhook(connection, webhook, **webhooks.NO_FAILURES, **how)
        return kept.webhook().status

    assert kept.send(failed(0), suspend_after_seconds=0).status == "suspended"
    assert restart() == "enabled"
    assert kept.send(replace(failed(0), response_status=410)).status == "disabled"
    assert restart() == "disabled"  # a new URL does not enable it
    assert restart(disabled=False) == "enabled"
    assert kept.send(failed(0), suspend_after_seconds=0).status == "suspended"
    assert restart(disabled=True) == "disabled"
    assert kept.webhook().suspended_at is None

    assert restart(disabled=False) == "enabled"
    for seconds in (0, 9):  # the failures before a restart do not count
        assert kept.send(failed(seconds), suspend_after_seconds=5).status == "enabled"
        restart()
