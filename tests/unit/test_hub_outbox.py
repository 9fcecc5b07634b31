"""When a delivery is tried again, when it is given up, and how long it is kept."""

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography.fernet import Fernet
from sqlalchemy import Engine, event, func, select, update

from pipeline.hub import schema
from pipeline.hub.database import Database, open_database
from pipeline.hub.events.log import EventLog
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repositories
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import outbox, suspension
from pipeline.hub.webhooks.activity import OutboxDelivery, list_deliveries, replay_delivery
from pipeline.hub.webhooks.deliveries import Deliverer
from pipeline.hub.webhooks.outbox import Attempt, Due
from pipeline.hub.webhooks.posting import MAX_RETRY_AFTER_SECONDS, _retry_after_seconds
from pipeline.hub.webhooks.store import (
    CreateWebhook,
    HubWatchedItem,
    SecretCipher,
    StoredWebhook,
    create_webhook,
    get_webhook,
)
from receiver.settings import ReceiverSettings

DAY = 86400.0


def due(attempt: int) -> Due:
    now = time.time()
    return Due(id="d1", payload="{}", attempt=attempt, queued_at=now, next_attempt_at=now)


def waits(attempt: int, failed: Attempt) -> list[float]:
    """The wait after the `attempt`-th attempt failed, many times over."""
    now = time.time()
    plans = [outbox._plan(due(attempt - 1), failed, attempt, HubSettings()) for _ in range(500)]
    assert {event for event, _ in plans} == {"failed"}
    return [at - now for _, at in plans if at is not None]


@pytest.mark.parametrize(
    ("attempt", "seconds"),
    list(enumerate((5, 30, 120, 600, 1800, 7200, 18000, 36000, 36000), start=1)),
)
def test_each_wait_is_the_schedules_with_a_fifth_more_or_less(attempt: int, seconds: int) -> None:
    found = waits(attempt, Attempt(started_at=0, milliseconds=1, response_status=500))
    assert 0.8 * seconds <= min(found) < 0.85 * seconds
    assert 1.15 * seconds < max(found) <= 1.2 * seconds + 1


def test_after_the_tenth_attempt_it_is_dead() -> None:
    failed = Attempt(started_at=0, milliseconds=1, error="no answer within 15 s")
    assert outbox._plan(due(9), failed, 10, HubSettings()) == ("given up", None)


def test_a_receiver_may_ask_for_a_longer_wait_and_not_for_a_shorter_one() -> None:
    asked = Attempt(started_at=0, milliseconds=1, response_status=503, retry_after_seconds=100)
    assert min(waits(1, asked)) >= 100
    assert min(waits(4, asked)) >= 480


def http_date(later: timedelta) -> str:
    return format_datetime(datetime.now(UTC) + later, usegmt=True)


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("17", 17),
        ("0", 0),
        ("999999", MAX_RETRY_AFTER_SECONDS),
        ("-5", None),
        ("soon", None),
        ("Mon, 01 Jan 99999999999 00:00:00 GMT", None),
        pytest.param(http_date(timedelta(hours=-1)), 0, id="an hour ago"),
        pytest.param(http_date(timedelta(days=1)), 3600, id="tomorrow"),
    ],
)
def test_retry_after_in_seconds_and_as_a_date(value: str, seconds: float | None) -> None:
    assert _retry_after_seconds(value) == seconds


def test_retry_after_as_a_date_that_is_near() -> None:
    near = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert _retry_after_seconds(near) == pytest.approx(90, abs=5)


def test_the_promised_times_are_the_defaults() -> None:
    hub, receiver = HubSettings(), ReceiverSettings()
    assert hub.delivery_timeout_seconds == 15
    assert hub.keep_deliveries_days == 30
    assert hub.reconcile_seconds == 60
    assert receiver.port == 7860


class Kept:
    """An outbox with one delivery, as old as a test makes it."""

    def __init__(self, folder: Path) -> None:
        self.database: Database = open_database(folder / "hub.sqlite")
        self._log = EventLog(
            database=self.database, hub_url="http://hub", metrics=HubMetrics(), wake=lambda: None
        )
        name = RepositoryName(type="dataset", owner="local", name="facts")
        watched = (HubWatchedItem(type="dataset", name="local/facts"),)
        request = CreateWebhook(url="http://127.0.0.1:9/", watched=watched)
        with self.database.write() as connection:
            self._repository = Repositories(folder).adopt(connection, name, private=True)
            self._id = create_webhook(connection, request, SecretCipher(Fernet.generate_key())).id
        self.record()

    def record(self) -> None:
        """One more delivery, due at once."""
        with self.database.write() as connection:
            self._log.record(connection, self._repository, action="create")

    def change(self, **columns: object) -> None:
        with self.database.write() as connection:
            connection.execute(update(schema.deliveries).values(**columns))

    def next_due(self) -> outbox.Due | None:
        with self.database.read() as connection:
            return outbox.next_due(connection, get_webhook(connection, self._id))

    def send(self, attempt: Attempt, **settings: object) -> StoredWebhook:
        """The webhook after what it gets next was sent, and that ended so."""
        told = HubSettings.model_validate(settings)
        with self.database.write() as connection:
            webhook = get_webhook(connection, self._id)
            due = outbox.next_due(connection, webhook)
            assert due is not None
            status = outbox.settle(connection, due, attempt, told)
            suspension.after_attempt(connection, webhook, attempt, status, told)
            return get_webhook(connection, self._id)

    def deliveries(self) -> list[OutboxDelivery]:
        """Newest first."""
        with self.database.read() as connection:
            return list(list_deliveries(connection, None, status=None, limit=99))

    def is_pruned(self, *, suspended: bool = False, **columns: object) -> bool:
        self.change(**columns)
        if suspended:
            with self.database.write() as connection:
                connection.execute(update(schema.webhooks).values(suspended_at=1.0))
        outbox.prune(self.database, keep_days=30)
        return not self.deliveries()


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Kept]:
    kept = Kept(tmp_path)
    yield kept
    kept.database.close()


def asks_for(seconds: float) -> Attempt:
    return Attempt(
        started_at=time.time(), milliseconds=1, response_status=429, retry_after_seconds=seconds
    )


def test_a_pause_that_a_receiver_asks_for_is_one_from_what_is_still_to_come_too(kept: Kept) -> None:
    for _ in range(11):
        kept.record()
    webhook = kept.send(asks_for(3600))
    kept.record()
    assert (webhook.status, webhook.num_failures) == ("enabled", 1)
    pauses = [(one.next_attempt_at or 0) - time.time() for one in kept.deliveries()]
    assert len(pauses) == 13
    assert 3500 < min(pauses) <= max(pauses) <= 3600


def test_a_suspended_receiver_that_asks_for_a_pause_is_not_tried_before(kept: Kept) -> None:
    for seconds, at_least in ((3600, 3600), (1800, 1800), (10, 240)):
        webhook = kept.send(asks_for(seconds), suspend_after_failures=1, suspend_after_seconds=0)
        assert webhook.status == "suspended" and webhook.probe_at is not None
        assert webhook.probe_at - time.time() == pytest.approx(at_least, abs=30)


REFUSED = Attempt(started_at=time.time(), milliseconds=1, error="refused", refused=True)


def test_a_receiver_that_refused_for_two_days_is_given_up(kept: Kept) -> None:
    assert kept.send(REFUSED).status == "enabled"
    [delivery] = kept.deliveries()
    assert (delivery.status, delivery.attempt) == ("pending", 0)
    kept.change(queued_at=time.time() - 2 * DAY - 1)
    assert kept.send(REFUSED).status == "suspended"
    [delivery] = kept.deliveries()
    assert (delivery.status, delivery.attempt, delivery.next_attempt_at) == ("dead", 0, None)


TAKEN = Attempt(started_at=time.time(), milliseconds=1, response_status=200)


def failed(seconds: float) -> Attempt:
    """At this time after the first one."""
    return Attempt(started_at=1e9 + seconds, milliseconds=1, response_status=500)


@pytest.mark.parametrize(
    ("attempt", "result", "said"),
    [
        (TAKEN, "delivered", "taken"),
        (failed(0), "failed", "will be tried again"),
        (REFUSED, "refused", ""),
    ],
)
def test_a_replay_during_the_last_attempt_makes_it_pending(
    kept: Kept, caplog: pytest.LogCaptureFixture, attempt: Attempt, result: str, said: str
) -> None:
    settings = HubSettings(delivery_schedule_seconds=(0,), refused_give_up_seconds=3600)
    metrics, cipher = HubMetrics(), SecretCipher(Fernet.generate_key())
    deliverer = Deliverer(kept.database, settings, cipher, metrics, None)
    kept.change(queued_at=time.time() - DAY)
    [stored] = kept.deliveries()
    found = deliverer._next(stored.webhook_id)
    assert found is not None
    due, webhook = found
    with kept.database.write() as connection:
        replay_delivery(connection, webhook.id, due.id)
    with caplog.at_level("INFO", "pipeline.hub.webhooks.deliveries"):
        deliverer._settle(due, webhook, attempt)
    [stored] = kept.deliveries()
    assert (stored.status, stored.attempt, stored.last_attempt_at) == ("pending", 0, None)
    counted = metrics.deliveries.labels(result=result)._value.get()
    assert (counted, said in caplog.text, "given up" in caplog.text) == (1, True, False)
    with kept.database.read() as connection:
        assert get_webhook(connection, webhook.id).status == "enabled"


def test_a_poison_event_dies_alone(kept: Kept) -> None:
    for number in range(10):
        assert kept.send(failed(number * 3600)).status == "enabled"
    kept.record()
    assert kept.send(TAKEN).status == "enabled"
    assert [one.status for one in kept.deliveries()] == ["delivered", "dead"]


def test_failures_of_one_moment_suspend_nothing(kept: Kept) -> None:
    for _ in range(9):
        kept.record()
    for number in range(10):
        assert kept.send(failed(number / 10)).status == "enabled"
    assert {one.attempt for one in kept.deliveries()} == {1}
    assert kept.send(failed(299)).status == "enabled"
    assert kept.send(failed(300)).status == "suspended"


def test_one_delivery_after_another_suspends(kept: Kept) -> None:
    for number in range(3):
        assert kept.send(failed(number * 600)).status == "enabled", "it is one delivery"
    for expected in ("enabled", "suspended"):
        kept.record()
        assert kept.send(failed(3600)).status == expected


def test_probes_take_turns_from_the_newest_on_and_none_is_dead(kept: Kept) -> None:
    unwell = {"suspend_after_failures": 1, "suspend_after_seconds": 0}
    assert kept.send(failed(0), **unwell, delivery_schedule_seconds=[0]).status == "suspended"
    assert kept.next_due() is None
    for _ in range(2):
        kept.record()
    newest, older, dead = kept.deliveries()
    assert kept.send(failed(2), **unwell).num_probes == 1
    assert kept.deliveries()[0].last_attempt_at == 1e9 + 2
    assert kept.send(TAKEN, **unwell).status == "enabled"
    states = {one.id: (one.status, one.attempt) for one in kept.deliveries()}
    assert states == {newest.id: ("pending", 0), older.id: ("delivered", 1), dead.id: ("dead", 1)}


OLD, RECENT = time.time() - 31 * DAY, time.time() - 29 * DAY


@pytest.mark.parametrize("status", ["delivered", "dead"])
def test_what_ended_a_month_ago_goes(kept: Kept, status: str) -> None:
    old = {"created_at": OLD, "queued_at": OLD, "last_attempt_at": OLD}
    assert kept.is_pruned(status=status, **old)


@pytest.mark.parametrize(
    "columns",
    [
        {"status": "dead", "created_at": OLD, "queued_at": OLD, "last_attempt_at": RECENT},
        {"status": "delivered", "created_at": OLD, "queued_at": RECENT, "last_attempt_at": RECENT},
        {"status": "pending", "created_at": OLD, "queued_at": OLD, "last_attempt_at": OLD},
        {"status": "pending", "created_at": OLD, "queued_at": OLD, "last_attempt_at": None},
    ],
)
def test_what_ended_later_or_waits_stays(kept: Kept, columns: dict[str, object]) -> None:
    assert not kept.is_pruned(**columns)


def test_many_go_a_few_at_a_time_and_their_events_with_them(kept: Kept) -> None:
    for _ in range(450):
        kept.record()
    kept.change(status="delivered", created_at=OLD, queued_at=OLD, last_attempt_at=OLD)
    kept.record()
    with kept.database.write() as connection:
        connection.execute(update(schema.events).values(created_at=OLD))
    sizes: list[int] = []

    def note(*arguments: Any) -> None:
        cursor, statement = arguments[1], arguments[2]
        if statement.startswith("DELETE"):
            sizes.append(cursor.rowcount)

    event.listen(Engine, "after_cursor_execute", note)
    try:
        outbox.prune(kept.database, keep_days=30)
    finally:
        event.remove(Engine, "after_cursor_execute", note)
    assert sizes == [200, 200, 51] * 2
    with kept.database.read() as connection:
        assert connection.scalar(select(func.count()).select_from(schema.events)) == 1
    assert [one.status for one in kept.deliveries()] == ["pending"]


def test_what_died_while_its_webhook_is_suspended_stays(kept: Kept) -> None:
    old = {"created_at": OLD, "queued_at": OLD, "last_attempt_at": OLD}
    assert not kept.is_pruned(suspended=True, status="dead", **old)
