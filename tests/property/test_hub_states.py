"""Whatever happens to a webhook and to its deliveries, the rows move as the tables say.

Triggers in the database write down every change of a state, whichever code makes it.
"""

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy import select

from pipeline.hub.database import open_database
from pipeline.hub.events.log import EventLog
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repositories
from pipeline.hub.schema import deliveries, webhooks
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.activity import replay_delivery
from pipeline.hub.webhooks.outbox import Attempt
from pipeline.hub.webhooks.states import DELIVERY_MOVES, WEBHOOK_MOVES, Move, WebhookEvent
from pipeline.hub.webhooks.store import (
    CreateWebhook,
    HubWatchedItem,
    SecretCipher,
    create_webhook,
    get_webhook,
)
from tests.hub_fixtures import SECRET_KEY

NAME = RepositoryName(type="dataset", owner="local", name="facts")
SETTINGS = HubSettings(delivery_schedule_seconds=(0, 0), suspend_after_seconds=0)
ENDS: dict[str, dict[str, Any]] = {
    "taken": {"response_status": 200},
    "failed": {"response_status": 500},
    "asked for a pause": {"response_status": 429, "retry_after_seconds": 60.0},
    "refused": {"error": "refused", "refused": True},
    "gone": {"response_status": 410},
}
STATE = "iif({0}.disabled, 'disabled', iif({0}.suspended_at IS NULL, 'enabled', 'suspended'))"
WRITE_DOWN = [
    "CREATE TABLE moved (what TEXT, source TEXT, target TEXT)",
    "CREATE TRIGGER new_delivery AFTER INSERT ON deliveries BEGIN"
    " INSERT INTO moved VALUES ('delivery', NULL, NEW.status); END",
    "CREATE TRIGGER old_delivery AFTER UPDATE OF status ON deliveries BEGIN"
    " INSERT INTO moved VALUES ('delivery', OLD.status, NEW.status); END",
    "CREATE TRIGGER new_webhook AFTER INSERT ON webhooks BEGIN"
    f" INSERT INTO moved VALUES ('webhook', NULL, {STATE.format('NEW')}); END",
    "CREATE TRIGGER old_webhook AFTER UPDATE OF disabled, suspended_at ON webhooks BEGIN"
    f" INSERT INTO moved VALUES ('webhook', {STATE.format('OLD')}, {STATE.format('NEW')}); END",
]


def pairs(what: str, moves: list[Move[Any]]) -> set[tuple[str, str | None, str]]:
    return {(what, source, move.target) for move in moves for source in move.sources or {None}}


ALLOWED = pairs("delivery", [*DELIVERY_MOVES.values()]) | pairs(
    "webhook", [*WEBHOOK_MOVES.values()]
)


class HubMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = TemporaryDirectory()
        root = Path(self.folder.name)
        self.database = open_database(root / "hub.sqlite")
        self.log = EventLog(
            database=self.database, hub_url="http://hub", metrics=HubMetrics(), wake=lambda: None
        )
        with self.database.write_relaxed() as connection:
            for statement in WRITE_DOWN:
                connection.exec_driver_sql(statement)
            self.repository = Repositories(root).adopt(connection, NAME, private=True)
            request = CreateWebhook(
                url="http://127.0.0.1:9/", watched=(HubWatchedItem(type="user", name="local"),)
            )
            self.id = create_webhook(connection, request, SecretCipher(SECRET_KEY)).id

    def teardown(self) -> None:
        self.database.close()
        self.folder.cleanup()

    @rule()
    def happen(self) -> None:
        with self.database.write_relaxed() as connection:
            self.log.record(connection, self.repository, action="create")

    @rule(end=st.sampled_from(sorted(ENDS)))
    def send(self, end: str) -> None:
        with self.database.write_relaxed() as connection:
            webhook = get_webhook(connection, self.id)
            due = outbox.head(connection, webhook)
            if due is not None:
                attempt = Attempt(started_at=time.time(), milliseconds=1, **ENDS[end])
                outbox.settle(connection, due, webhook, attempt, SETTINGS)

    @rule(data=st.data(), force=st.booleans())
    def replay(self, data: st.DataObject, force: bool) -> None:
        with self.database.write_relaxed() as connection:
            ids = connection.scalars(select(deliveries.c.id).order_by(deliveries.c.created_at))
            if found := ids.all():
                chosen = data.draw(st.integers(0, len(found) - 1))
                replay_delivery(connection, self.id, found[chosen], force=force)

    @rule(event=st.sampled_from(["enabled", "disabled", "changed"]))
    def decide(self, event: WebhookEvent) -> None:
        with self.database.write_relaxed() as connection:
            outbox.restart(connection, get_webhook(connection, self.id), event)

    def moved(self) -> set[tuple[str, str | None, str]]:
        with self.database.read() as connection:
            rows = connection.exec_driver_sql("SELECT what, source, target FROM moved").all()
        return {(row.what, row.source, row.target) for row in rows}

    @invariant()
    def every_change_is_a_move(self) -> None:
        assert self.moved() <= ALLOWED
        with self.database.read() as connection:
            states = connection.execute(select(webhooks.c.disabled, webhooks.c.suspended_at)).one()
        assert not (states.disabled and states.suspended_at is not None)


def test_every_change_of_a_state_is_a_move_of_the_tables() -> None:
    run_state_machine_as_test(
        HubMachine,
        settings=settings(
            max_examples=15,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=[HealthCheck.too_slow],
        ),
    )


def test_every_move_of_the_tables_can_be_made() -> None:
    hub = HubMachine()
    try:
        hub.happen()
        hub.happen()
        hub.send("failed")
        hub.send("taken")
        for first in ("enabled", "changed", "disabled"):  # what ends the suspension
            hub.send("refused")
            hub.decide(first)
        hub.decide("enabled")
        hub.send("gone")
        hub.decide("enabled")
        hub.send("failed")
        hub.send("gone")
        hub.decide("enabled")
        hub.decide("disabled")
        hub.decide("enabled")
        hub.send("failed")
        with hub.database.write_relaxed() as connection:
            for id in connection.scalars(select(deliveries.c.id)).all():
                replay_delivery(connection, hub.id, id)
        hub.send("taken")
        with hub.database.write_relaxed() as connection:
            ids = connection.scalars(select(deliveries.c.id).filter_by(status="delivered"))
            replay_delivery(connection, hub.id, ids.all()[0])
        assert hub.moved() == ALLOWED
    finally:
        hub.teardown()
