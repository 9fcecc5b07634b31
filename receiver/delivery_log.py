"""Deliveries that were acknowledged and wait for their handler: one SQLite file.

A row is on disk before its sender is answered. Headers that carry a proof are never written.
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
"""How long a delivery is known again after it last arrived: hubs keep theirs for 30 days."""

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
    due_at REAL,  -- NULL once it was handled
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
    """How often its handler was called and failed."""


@dataclass(frozen=True, kw_only=True)
class EndedCall:
    """Of the handler of one delivery."""

    path: str
    id: str
    due_at: float | None
    """When it is to be called again; None where it succeeded."""


class DeliveryLog:
    """For one process at a time, which a lock beside the file holds to, and one thread at a time.

    Times are seconds since the epoch. Raises `ReceiverError` if another process has the file open,
    or where a newer release or another program wrote it, which leaves it as it is.
    Opening a file that is begun writes nothing, so that it goes on where the disk is full.
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
        try:
            version = _version(path)
            self._connection = _connect(path, synchronous="NORMAL")
            if version < _SCHEMA_VERSION:
                self._connection.executescript(_SCHEMA)
            self._synced = _connect(path, synchronous="FULL")
        except sqlite3.Error as error:
            self._lock.release()
            raise ReceiverError(
                f"Deliveries cannot be stored in {path}: {error}. Make room where its disk is full,"
                " set `deliveries_path` to another file, or move this one away."
            ) from error
        except BaseException:
            self._lock.release()
            raise

    def close(self) -> None:
        self._synced.close()
        self._connection.close()
        self._lock.release()

    def add(self, deliveries: Sequence[NewDelivery], now: float) -> list[bool]:
        """Whether each is new. They are on disk, in either case, when this returns; all or none."""
        keys = [(delivery.path, delivery.id) for delivery in deliveries]
        known = self._known(keys)
        # One statement, so one transaction, and one call: each lets go of the interpreter, which a
        # busy event loop gives back late.
        rows = ", ".join(["(?, ?, ?, ?, ?, ?)"] * len(deliveries))
        self._synced.execute(
            "INSERT INTO deliveries (path, id, headers, body, received_at, due_at)"
            f" VALUES {rows}"
            # Who sends it again may do so once more, for as long as ever.
            " ON CONFLICT DO UPDATE SET received_at = excluded.received_at",
            [
                value
                for delivery in deliveries
                for value in (
                    *(delivery.path, delivery.id, _kept(delivery.headers), delivery.body),
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
        # A cross join keeps this order of the loops: `(path, id) IN (VALUES …)` reads all rows.
        found = self._connection.execute(
            f"WITH asked (path, id) AS (VALUES {places})"
            " SELECT path, id FROM asked CROSS JOIN deliveries USING (path, id)",
            [part for key in keys for part in key],
        )
        return set(found)

    def due(self, now: float, paths: Collection[str]) -> list[StoredDelivery]:
        """The deliveries to these paths whose handler is to be called, longest waiting first."""
        if not paths:
            return []
        rows = self._connection.execute(
            # Told which index: by that of the paths, all that was ever handled would be read.
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

    def settle(self, calls: Sequence[EndedCall]) -> None:
        """Of what was handled, keep no more than what tells that it was here.

        A power cut may undo it, and the handler is called again; a killed process does not.
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


def _version(path: Path) -> int:
    """Of its schema; 0 where nobody has begun it."""
    if not path.exists():
        return 0
    try:
        version = _read_version(path, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
            raise
        # Who began it was killed at its first statement, and only a writer takes that back.
        version = _read_version(path, "rw")
    if version > _SCHEMA_VERSION:
        raise ReceiverError(
            f"{path} has schema {version}, and this release knows none beyond {_SCHEMA_VERSION}: a"
            " newer release wrote it. It was not touched; upgrade hotpush, or set `deliveries_path`"
            " to another file."
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
    # 40 MB: what is moved from the log to the file at a time, while a sender waits.
    connection.execute("PRAGMA wal_autocheckpoint=10000")
    return connection


def _kept(headers: Mapping[str, str]) -> str:
    return json.dumps(
        {name: value for name, value in headers.items() if name not in _PROOF_HEADERS}
    )
