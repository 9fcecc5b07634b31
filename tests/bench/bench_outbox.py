"""Deliveries per second to a local receiver, and what an endpoint that hangs costs another.

    python -m tests.bench.bench_outbox [--events 2000] [--hang-seconds 15]

Prints JSON. The receiver is a process of its own; the events are put into the outbox directly, so
that git's own time is not measured.
"""

import argparse
import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import uvicorn
from cryptography.fernet import Fernet
from sqlalchemy import select

from pipeline.hub import outbox, schema
from pipeline.hub.database import Database, open_database
from pipeline.hub.deliveries import Deliverer
from pipeline.hub.events import EventLog
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.names import RepositoryName
from pipeline.hub.repositories import Repositories, Repository
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import CreateWebhook, SecretBox, Watched, create_webhook
from tests.hub_fixtures import listening_socket


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
        self.box = SecretBox(Fernet.generate_key())
        metrics = HubMetrics()
        self.deliverer = Deliverer(self.database, settings, self.box, metrics, None)
        self.log = EventLog(
            database=self.database, hub_url="http://hub", metrics=metrics, wake=self.deliverer.wake
        )
        self.repositories = Repositories(root)

    def repository(self, name: str) -> Repository:
        with self.database.write() as connection:
            where = RepositoryName(type="dataset", owner="local", name=name)
            return self.repositories.adopt(connection, where, private=True)

    def webhook(self, repository: str, url: str) -> str:
        watched = (Watched(type="dataset", name=f"local/{repository}"),)
        request = CreateWebhook(url=url, watched=watched, secret="whsec_c2VjcmV0")
        with self.database.write() as connection:
            return create_webhook(connection, request, self.box).id

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
                if not outbox.list_deliveries(connection, webhook_id, status="pending", limit=1):
                    return
            await asyncio.sleep(0.02)


async def throughput(root: Path, url: str, num_events: int) -> dict[str, float]:
    """A full outbox, emptied by one worker."""
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
    return {"deliveries": num_events, "deliveries_per_second": round(num_events / seconds, 1)}


async def paced(
    root: Path, url: str, num_events: int, hang_url: str | None, hang_seconds: float
) -> float:
    """p99 in ms of one webhook at 20 events/s, with or without one that hangs beside it."""
    bench = Bench(root, HubSettings(delivery_timeout_seconds=hang_seconds))
    repository, id = bench.repository("facts"), bench.webhook("facts", url)
    if hang_url is not None:
        bench.webhook("facts", hang_url)
    bench.deliverer.start()
    for _ in range(num_events):
        await asyncio.to_thread(bench.event, repository)
        await asyncio.sleep(0.05)
    await bench.drained(id)
    found = bench.latencies(id)
    await bench.deliverer.stop()
    bench.database.close()
    return 1000 * statistics.quantiles(found, n=100)[98]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--events", type=int, default=2000)
    arguments.add_argument("--hang-seconds", type=float, default=15)
    given = arguments.parse_args()
    ours, theirs = multiprocessing.Pipe()
    receiver = multiprocessing.get_context("spawn").Process(
        target=serve, args=(theirs,), daemon=True
    )
    receiver.start()
    url = f"http://127.0.0.1:{ours.recv()}"
    try:
        with tempfile.TemporaryDirectory() as folder:
            roots = [Path(folder) / name for name in ("full", "alone", "beside")]
            for root in roots:
                root.mkdir()
            report = asyncio.run(throughput(roots[0], url, given.events))
            num_paced = max(100, given.events // 5)
            alone = asyncio.run(paced(roots[1], url, num_paced, None, given.hang_seconds))
            beside = asyncio.run(paced(roots[2], url, num_paced, f"{url}/hang", given.hang_seconds))
        report |= {"p99_alone_ms": round(alone, 1), "p99_beside_a_hanging_one_ms": round(beside, 1)}
        print(json.dumps(report, indent=2))
    finally:
        receiver.terminate()
        receiver.join()


if __name__ == "__main__":
    main()
