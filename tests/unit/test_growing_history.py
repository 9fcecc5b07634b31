"""What a delivery costs does not grow with those that were stored before it."""

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.record import Delivery, JobRequest
from jobs.spec import JobSpec
from jobs.store import JobStore
from receiver.delivery_log import DeliveryLog, NewDelivery

BATCH, HISTORY = 16, 4_000


@pytest.fixture
def num_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many instructions SQLite has carried out so far, by all connections: unlike seconds,
    they are the same on every machine."""
    steps = 0

    def count() -> None:
        nonlocal steps
        steps += 1

    def connected(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)
        connection.set_progress_handler(count, 1)
        return connection

    connect: Callable[..., sqlite3.Connection] = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connected)
    monkeypatch.setattr(sqlite3.dbapi2, "connect", connected)
    return lambda: steps


def cost(num_steps: Callable[[], int], store_batch: Callable[[int], object], first: int) -> int:
    before = num_steps()
    store_batch(first)
    return num_steps() - before


def test_of_a_durable_handler(tmp_path: Path, num_steps: Callable[[], int]) -> None:
    def store(first: int, number: int = BATCH) -> list[bool]:
        ids = [f"delivery-{first + place}" for place in range(number)]
        return log.add([NewDelivery(path="/x", id=id, headers={}, body=b"{}") for id in ids], 0.0)

    log = DeliveryLog(tmp_path / "receiver.db")
    try:
        early = cost(num_steps, store, 0)
        for first in range(BATCH, HISTORY, 100):
            store(first, 100)
        late = cost(num_steps, store, 2 * HISTORY)
        assert store(2 * HISTORY) == [False] * BATCH
    finally:
        log.close()
    assert 0 < late < 1.5 * early


def test_of_a_job(tmp_path: Path, num_steps: Callable[[], int]) -> None:
    def store(first: int, number: int = BATCH) -> list[str]:
        ids = [f"delivery-{first + place}" for place in range(number)]
        return [
            submission.how
            for submission in jobs.submit_all(
                [
                    JobRequest(
                        spec=JobSpec(command=("true",)),
                        delivery=Delivery(source=f"hub/{place % 3}", id=id, body="{}"),
                    )
                    for place, id in enumerate(ids)
                ]
            )
        ]

    with JobStore.open(tmp_path / "jobs.db") as jobs:
        early = cost(num_steps, store, 0)
        store(BATCH, HISTORY)
        late = cost(num_steps, store, 2 * HISTORY)
        assert store(2 * HISTORY) == ["duplicate"] * BATCH
    assert 0 < late < 1.5 * early
