"""Deliveries that were acknowledged and wait for their handler: one SQLite file.

A row is on disk before its sender is answered. Headers that carry a proof are never written.
"""

import json
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from receiver.errors import ReceiverError

KEPT_SECONDS = 31 * 24 * 3600.0
"""How long a delivery is known again after it last arrived: hubs keep theirs for 30 days."""

_PROOF_HEADERS = {
    "authorization",
    "cookie",
    "webhook-signature",
    "x-gitea-signature",
    "x-gitlab-token",
    "x-hub-signature",
    "x-hub-signature-256",
    "x-webhook-secret",
}

_SCHEMA = """
CREATE TABLE IF NOT EXISTS deliveries (
    path TEXT NOT NULL,
    id TEXT NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    received_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at REAL,  -- NULL once it was handled
    PRIMARY KEY (path, id)
) STRICT;
CREATE INDEX IF NOT EXISTS deliveries_due ON deliveries (due_at) WHERE due_at IS NOT NULL;
"""


@dataclass(frozen=True, kw_only=True)
class NewDelivery:
    path: str
    id: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True, kw_only=True)
class StoredDelivery(NewDelivery):
    attempts: int
    """How often its handler was called and failed."""


class DeliveryLog:
    """For one process at a time, which a lock beside the file holds to, and one thread at a time.

    Times are seconds since the epoch. Raises `ReceiverError` if another process has the file open.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ReceiverError(
                f"Another receiver stores its deliveries in {path}: stop it, or set"
                " `deliveries_path` to another file."
            ) from error
        self._connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._connection.execute("PRAGMA journal_mode=WAL")
        self._connection.execute("PRAGMA synchronous=FULL")
        self._connection.executescript(_SCHEMA)

    def close(self) -> None:
        self._connection.close()
        self._lock.release()

    def add(self, deliveries: Sequence[NewDelivery], now: float) -> list[bool]:
        """Whether each is new. They are on disk, in either case, when this returns; all or none."""
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection:
            return [self._add(delivery, now) for delivery in deliveries]

    def _add(self, delivery: NewDelivery, now: float) -> bool:
        kept = {
            name: value for name, value in delivery.headers.items() if name not in _PROOF_HEADERS
        }
        added = self._connection.execute(
            "INSERT INTO deliveries (path, id, headers, body, received_at, due_at)"
            " VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING",
            (delivery.path, delivery.id, json.dumps(kept), delivery.body, now, now),
        )
        if added.rowcount == 0:
            # Who sends it again may do so once more, as long as ever.
            self._connection.execute(
                "UPDATE deliveries SET received_at = ? WHERE path = ? AND id = ?",
                (now, delivery.path, delivery.id),
            )
        return added.rowcount == 1

    def due(self, now: float) -> list[StoredDelivery]:
        """The deliveries whose handler is to be called, longest waiting first."""
        rows = self._connection.execute(
            "SELECT path, id, headers, body, attempts FROM deliveries"
            " WHERE due_at <= ? ORDER BY due_at, received_at LIMIT 100",
            (now,),
        )
        return [
            StoredDelivery(
                path=path, id=id, headers=json.loads(headers), body=body, attempts=attempts
            )
            for path, id, headers, body, attempts in rows
        ]

    def handled(self, delivery: StoredDelivery) -> None:
        """Keep no more of it than what tells that it was here."""
        self._connection.execute(
            "UPDATE deliveries SET due_at = NULL, headers = '{}', body = x''"
            " WHERE path = ? AND id = ?",
            (delivery.path, delivery.id),
        )

    def failed(self, delivery: StoredDelivery, due_at: float) -> None:
        self._connection.execute(
            "UPDATE deliveries SET due_at = ?, attempts = attempts + 1 WHERE path = ? AND id = ?",
            (due_at, delivery.path, delivery.id),
        )

    def next_due_at(self, now: float) -> float | None:
        """When `due` will have more than it has `now`; None where nothing is put off."""
        due_at: float | None = self._connection.execute(
            "SELECT min(due_at) FROM deliveries WHERE due_at > ?", (now,)
        ).fetchone()[0]
        return due_at

    def forget(self, now: float) -> None:
        """Deliveries that were handled, and did not arrive again for long."""
        self._connection.execute(
            "DELETE FROM deliveries WHERE due_at IS NULL AND received_at < ?", (now - KEPT_SECONDS,)
        )
