"""Stores acknowledged deliveries until their handler has succeeded, in one SQLite file.

A delivery is on disk before its sender gets an answer. Headers that carry a proof are never
written.
"""

import contextlib
import json
import sqlite3
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from receiver.errors import ReceiverError

KEPT_SECONDS = 31 * 24 * 3600.0
"""How long a repeated delivery is recognised after its last arrival. Hubs keep their deliveries for
30 days."""

_PROOF_HEADERS = {
    "authorization",
    "cookie",
    "svix-signature",
    "webhook-signature",
    "x-gitea-signature",
    "x-gitlab-token",
    "x-hub-signature",
    "x-hub-signature-256",
    "x-webhook-secret",
}

_SCHEMA_VERSION = 1
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS deliveries (
    path TEXT NOT NULL,
    id TEXT NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    received_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at REAL,  -- NULL once its handler succeeded
    PRIMARY KEY (path, id)
) STRICT;
CREATE INDEX IF NOT EXISTS deliveries_due ON deliveries (due_at) WHERE due_at IS NOT NULL;
PRAGMA user_version = {_SCHEMA_VERSION};
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
    """How many calls of the delivery's handler have failed."""


@dataclass(frozen=True, kw_only=True)
class HandlerResult:
    """How one call of a delivery's handler ended."""

    path: str
    id: str
    due_at: float | None
    """When to call the handler again; None if the call succeeded."""


class DeliveryLog:
    """Only one process at a time can open the file, because of a lock file beside it. Only one
    thread at a time may call the methods. Times are seconds since the epoch.

    Raises `ReceiverError` if another process has the file open, or if a newer release or another
    program wrote the file; such a file is not changed. Opening an existing file writes nothing, so
    that a receiver can start while the disk is full.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = FileLock(f"{path}.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ReceiverError(
                f"Another receiver stores its deliveries in {path}: stop that receiver, or set"
                " `deliveries_path` to another file."
            ) from error
        try:
            version = _version(path)
            self._connection = _connect(path, synchronous="NORMAL")
            if version < _SCHEMA_VERSION:
                self._connection.executescript(_SCHEMA)
            self._synced = _connect(path, synchronous="FULL")
        except sqlite3.Error as error:
            self._lock.release()
            raise ReceiverError(
                f"Deliveries cannot be stored in {path}: {error}. Free disk space, set"
                " `deliveries_path` to another file, or move this file away."
            ) from error
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        self._synced.close()
        self._connection.close()
        self._lock.release()

    def add(self, deliveries: Sequence[NewDelivery], now: float) -> list[bool]:
        """Store all deliveries or none. Returns for each delivery whether it is new.

        When this returns, all deliveries are on disk, whether they are new or not.
        """
        keys = [(delivery.path, delivery.id) for delivery in deliveries]
        known = self._known(keys)
        # Use one statement for all rows, because each call releases the interpreter lock, and a
        # busy event loop takes long to give the lock back.
        rows = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(deliveries))
        self._synced.execute(
            "INSERT INTO deliveries (path, id, headers, body, received_at, due_at)"
            f" VALUES {rows}"
            # A sender that repeats a delivery may repeat it again, so count KEPT_SECONDS from now.
            " ON CONFLICT DO UPDATE SET received_at = excluded.received_at",
            [
                value
                for delivery in deliveries
                for value in (
                    *(delivery.path, delivery.id, _stored(delivery.headers), delivery.body),
                    *(now, now),
                )
            ],
        )
        are_new = []
        for key in keys:
            are_new.append(key not in known)
            known.add(key)
        return are_new

    def _known(self, keys: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
        places = ", ".join(["(?, ?)"] * len(keys))
        # With a cross join, SQLite looks up each key; with `(path, id) IN (VALUES …)`, it would
        # read all rows.
        found = self._connection.execute(
            f"WITH asked (path, id) AS (VALUES {places})"
            " SELECT path, id FROM asked CROSS JOIN deliveries USING (path, id)",
            [part for key in keys for part in key],
        )
        return set(found)

    def due(self, now: float, paths: Collection[str]) -> list[StoredDelivery]:
        """Up to 100 deliveries to these paths whose handler must be called now, oldest first."""
        if not paths:
            return []
        rows = self._connection.execute(
            # Name the index, because SQLite would choose the index on `path` and scan every row
            # that is already handled.
            "SELECT path, id, headers, body, attempts FROM deliveries INDEXED BY deliveries_due"
            f" WHERE due_at <= ? AND path IN ({', '.join('?' * len(paths))})"
            " ORDER BY due_at, received_at LIMIT 100",
            (now, *paths),
        )
        return [
            StoredDelivery(
                path=path, id=id, headers=json.loads(headers), body=body, attempts=attempts
            )
            for path, id, headers, body, attempts in rows
        ]

    def settle(self, calls: Sequence[HandlerResult]) -> None:
        """Store how calls ended. Only the path and the id of a handled delivery stay, to recognise
        a repeat.

        A power cut may undo this, and the handler is then called again. The death of this process
        does not undo it.
        """
        handled = [(call.path, call.id) for call in calls if call.due_at is None]
        failed = [(call.due_at, call.path, call.id) for call in calls if call.due_at is not None]
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection:
            self._connection.executemany(
                "UPDATE deliveries SET due_at = NULL, headers = '{}', body = x''"
                " WHERE path = ? AND id = ?",
                handled,
            )
            self._connection.executemany(
                "UPDATE deliveries SET due_at = ?, attempts = attempts + 1"
                " WHERE path = ? AND id = ?",
                failed,
            )

    def next_due_at(self, now: float) -> float | None:
        """When the next delivery that is not due yet becomes due; None if there is no such
        delivery."""
        due_at: float | None = self._connection.execute(
            "SELECT min(due_at) FROM deliveries WHERE due_at > ?", (now,)
        ).fetchone()[0]
        return due_at

    def forget(self, now: float) -> None:
        """Delete handled deliveries that have not arrived again for `KEPT_SECONDS`."""
        self._connection.execute(
            "DELETE FROM deliveries WHERE due_at IS NULL AND received_at < ?", (now - KEPT_SECONDS,)
        )


def _version(path: Path) -> int:
    """The version of the file's schema; 0 if there is no file or no schema yet."""
    if not path.exists():
        return 0
    try:
        version = _read_version(path, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
            raise
        # The process that created the file was killed during its first write. Only a connection
        # that may write can roll that write back.
        version = _read_version(path, "rw")
    if version > _SCHEMA_VERSION:
        raise ReceiverError(
            f"{path} has schema {version}, but the newest schema that this release knows is"
            f" {_SCHEMA_VERSION}: a newer release wrote the file. The file was not changed."
            " Upgrade hotpush, or set `deliveries_path` to another file."
        )
    return version


def _read_version(path: Path, mode: Literal["ro", "rw"]) -> int:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _connect(path: Path, *, synchronous: Literal["FULL", "NORMAL"]) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute(f"PRAGMA synchronous={synchronous}")
    # A checkpoint moves this many pages (40 MB) from the write-ahead log to the file, and a sender
    # waits meanwhile.
    connection.execute("PRAGMA wal_autocheckpoint=10000")
    return connection


def _stored(headers: Mapping[str, str]) -> str:
    return json.dumps(
        {name: value for name, value in headers.items() if name not in _PROOF_HEADERS}
    )
