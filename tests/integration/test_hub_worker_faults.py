"""What nobody foresaw ends no worker of the hub: it is logged, counted, and the work goes on.

The fault is real: the schema of the hub's file is damaged behind its back.
"""

import asyncio
import contextlib
import logging
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.hub import deliveries
from pipeline.hub.database import open_database
from pipeline.hub.deliveries import Deliverer, HubMetrics
from pipeline.hub.events import Event, EventLog
from pipeline.hub.repositories import RepositoryName
from pipeline.hub.routes.webhooks import WebhookRequest, create_webhook
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import HubWatchedItem
from tests.hub_fixtures import SECRET_KEY, Receiver, add_row, recording_receiver

NAME = RepositoryName(type="dataset", owner="local", name="facts")


@pytest.fixture(autouse=True)
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deliveries, "BROKEN_OFF_SECONDS", 0.02)


class Outbox:
    """An event for a webhook that is told to a receiver, and the means to damage the file."""

    def __init__(self, folder: Path, receiver: Receiver) -> None:
        self._file = folder / "hub.sqlite"
        self.database = open_database(self._file)
        self.metrics = HubMetrics()
        log = EventLog(database=self.database, hub_url="http://hub")
        watched = (HubWatchedItem(type="user", name="local"),)
        with self.database.write() as connection:
            repository = add_row(connection, folder, NAME)
            request = WebhookRequest(url=receiver.url, watched=watched)
            create_webhook(connection, request, SECRET_KEY)
            log.record(connection, repository, Event(action="create"))

    def sql(self, statement: str, *values: str) -> None:
        with contextlib.closing(sqlite3.connect(self._file)) as connection, connection:
            connection.execute("PRAGMA writable_schema = ON")
            connection.execute(statement, values)
            # The hub's connections read the schema anew when this has changed.
            (version,) = connection.execute("PRAGMA schema_version").fetchone()
            connection.execute(f"PRAGMA schema_version = {version + 1}")

    def failures(self, worker: str) -> float:
        return float(self.metrics.worker_failures.labels(worker=worker)._value.get())

    def deliver(self, *conditions: Callable[[], bool], repair: Callable[[], None]) -> None:
        """Serve until the first condition holds, repair, and serve until the second one does."""

        async def serve() -> None:
            starts_no_job: Any = None
            deliverer = Deliverer(
                self.database, HubSettings(), SECRET_KEY, self.metrics, starts_no_job
            )
            running = asyncio.create_task(deliverer.run())
            try:
                async with asyncio.timeout(30):
                    for number, condition in enumerate(conditions):
                        while not condition():
                            await asyncio.sleep(0.01)
                        if number == 0:
                            repair()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(serve())


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with recording_receiver() as receiver:
        yield receiver


@pytest.fixture
def outbox(tmp_path: Path, receiver: Receiver) -> Iterator[Outbox]:
    outbox = Outbox(tmp_path, receiver)
    yield outbox
    outbox.database.close()


def test_a_dispatcher_that_meets_a_damaged_file_goes_on_when_it_is_repaired(
    outbox: Outbox, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    index = "SELECT sql FROM sqlite_schema WHERE name = 'deliveries_pending'"
    with outbox.database.read() as connection:
        whole = connection.exec_driver_sql(index).scalar_one()
    change = "UPDATE sqlite_schema SET sql = ? WHERE name = 'deliveries_pending'"
    outbox.sql(change, "CREATE INDEX nonsense")
    with caplog.at_level(logging.ERROR, "pipeline.hub.deliveries"):
        outbox.deliver(
            lambda: outbox.failures("dispatcher") >= 2,
            lambda: len(receiver.received) == 1,
            repair=lambda: outbox.sql(change, whole),
        )
    assert "malformed database schema" in caplog.text
