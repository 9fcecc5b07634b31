"""Deliveries per second to a local receiver, and what an endpoint that hangs costs another.

The receiver is a process of its own; the events are put into the outbox directly, so that git's own
time is not measured. With and without the endpoint that hangs take turns.
"""

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.fernet import Fernet
from sqlalchemy import select

from pipeline.hub import schema
from pipeline.hub.database import Database, open_database
from pipeline.hub.events.log import EventLog
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import RepositoryName
from pipeline.hub.repositories.store import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks.activity import list_deliveries
from pipeline.hub.webhooks.deliveries import Deliverer
from pipeline.hub.webhooks.store import CreateWebhook, HubWatchedItem, SecretCipher, create_webhook
from tests.bench.result import Result, at_least, at_most, reported, run_program
from tests.bench.timing import in_turns, percentile
from tests.hub_fixtures import listening_socket


@dataclass(frozen=True, kw_only=True)
class Size:
    events: int
    """In a full outbox."""
    paced_events: int
    hang_seconds: float
    rounds: int


FULL = Size(events=2_000, paced_events=600, hang_seconds=15.0, rounds=3)
SMALL = Size(events=60, paced_events=10, hang_seconds=1.0, rounds=1)
PER_SECOND = 20.0
TARGET_PER_SECOND, TARGET_EXTRA_MS = 200.0, 100.0


def measure(size: Size) -> Result:
    """Deliveries per second, and p99 of one endpoint beside one that hangs."""
    with _receiver() as url, tempfile.TemporaryDirectory() as name:
        number = 0

        def folder() -> Path:
            nonlocal number
            number += 1
            made = Path(name) / str(number)
            made.mkdir()
            return made

        def paced(hang_url: str | None) -> list[float]:
            return asyncio.run(_paced(folder(), url, hang_url, size))

        rates = [asyncio.run(_throughput(folder(), url, size.events)) for _ in range(size.rounds)]
        found = in_turns(
            size.rounds,
            {"alone": lambda: paced(None), "beside": lambda: paced(f"{url}/hang")},
        )
    p99 = {
        name: [1e3 * percentile(each, 0.99) for each in rounds] for name, rounds in found.items()
    }
    alone, beside = (statistics.median(p99[name]) for name in ("alone", "beside"))
    hung = f"{size.hang_seconds:g} s"
    return Result(
        figures=(
            at_least("deliveries", statistics.median(rates), TARGET_PER_SECOND, "per second"),
            at_most(
                f"p99 that an endpoint which hangs for {hung} adds to another's",
                beside - alone,
                TARGET_EXTRA_MS,
                "ms",
            ),
            reported("p99 of an endpoint alone", alone, "ms"),
            reported("p99 beside one that hangs", beside, "ms"),
        ),
        bounded_by="one request after another to an endpoint, in order, and two transactions for "
        "each",
        detail={"deliveries_per_second": rates, "p99_ms": p99},
    )


async def receive(scope: Any, receive: Any, send: Any) -> None:
    """204 for everything; a path that ends in /hang gets no answer."""
    while (await receive()).get("more_body"):
        pass
    if scope["path"].endswith("/hang"):
        await asyncio.sleep(3600)
    await send({"type": "http.response.start", "status": 204, "headers": []})
    await send({"type": "http.response.body", "body": b""})


def serve(port: Connection) -> None:
    listener = listening_socket()
    port.send(listener.getsockname()[1])
    config = uvicorn.Config(receive, log_level="critical", access_log=False, lifespan="off")
    uvicorn.Server(config).run(sockets=[listener])


class Bench:
    def __init__(self, root: Path, settings: HubSettings) -> None:
        self.database: Database = open_database(root / "hub.sqlite")
        self.cipher = SecretCipher(Fernet.generate_key())
        metrics = HubMetrics()
        self.deliverer = Deliverer(self.database, settings, self.cipher, metrics, None)
        self.log = EventLog(
            database=self.database, hub_url="http://hub", metrics=metrics, wake=self.deliverer.wake
        )
        self.repositories = Repositories(root)

    def repository(self, name: str) -> Repository:
        with self.database.write() as connection:
            where = RepositoryName(type="dataset", owner="local", name=name)
            return self.repositories.adopt(connection, where, private=True)

    def webhook(self, repository: str, url: str) -> str:
        watched = (HubWatchedItem(type="dataset", name=f"local/{repository}"),)
        request = CreateWebhook(url=url, watched=watched, secret="whsec_c2VjcmV0")
        with self.database.write() as connection:
            return create_webhook(connection, request, self.cipher).id

    def event(self, repository: Repository) -> None:
        with self.database.write() as connection:
            self.log.record(connection, repository, action="update", scope="repo.config")
        self.deliverer.wake()

    def latencies(self, webhook_id: str) -> list[float]:
        """Seconds from each event to the end of its attempt, of those that were delivered."""
        table = schema.deliveries
        query = select(table.c.created_at, table.c.last_attempt_at, table.c.milliseconds).where(
            table.c.webhook_id == webhook_id, table.c.status == "delivered"
        )
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        return [row.last_attempt_at + row.milliseconds / 1000 - row.created_at for row in rows]

    async def drained(self, webhook_id: str) -> None:
        while True:
            with self.database.read() as connection:
                if not list_deliveries(connection, webhook_id, status="pending", limit=1):
                    return
            await asyncio.sleep(0.02)


async def _throughput(root: Path, url: str, num_events: int) -> float:
    """A full outbox, emptied by one worker; deliveries per second."""
    bench = Bench(root, HubSettings())
    repository, id = bench.repository("facts"), bench.webhook("facts", url)
    with bench.database.write() as connection:
        for _ in range(num_events):
            bench.log.record(connection, repository, action="update", scope="repo.config")
    start = time.perf_counter()
    bench.deliverer.start()
    await bench.drained(id)
    seconds = time.perf_counter() - start
    await bench.deliverer.stop()
    bench.database.close()
    return num_events / seconds


async def _paced(root: Path, url: str, hang_url: str | None, size: Size) -> list[float]:
    """Seconds from each event to its delivery to `url`, with or without another that hangs."""
    bench = Bench(root, HubSettings(delivery_timeout_seconds=size.hang_seconds))
    repository, id = bench.repository("facts"), bench.webhook("facts", url)
    if hang_url is not None:
        bench.webhook("facts", hang_url)
    bench.deliverer.start()
    for _ in range(size.paced_events):
        await asyncio.to_thread(bench.event, repository)
        await asyncio.sleep(1 / PER_SECOND)
    await bench.drained(id)
    found = bench.latencies(id)
    await bench.deliverer.stop()
    bench.database.close()
    if len(found) != size.paced_events:
        raise RuntimeError(f"{len(found)} of {size.paced_events} events were delivered")
    return found


@contextmanager
def _receiver() -> Iterator[str]:
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        # Told to end politely, it would wait for the requests that hang.
        process.kill()
        process.join()


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
