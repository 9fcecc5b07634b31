"""Stores the deliveries of durable handlers in one SQLite file. A handler is *durable* if each of
its deliveries is stored before the handler is called. If `MAX_ATTEMPTS` calls for a delivery have
failed (`receiver/durable.py`), the receiver gives up the delivery, which stays in the file as a
*dead letter*. The names `died_at` and `deliveries_dead` in this file are about dead letters. (For
hotpush's hub, a *dead* delivery is something else: the hub has given up sending it.)

A delivery is on disk before its sender gets an answer. Headers with secrets or signatures are never
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
"""A delivery that is repeated within this time after its last arrival is recognised as a repeat.

By default, hotpush's own hub keeps a delivery for 30 days after its last attempt to send it. So a
repeat from this hub is normally recognised. There are two exceptions:

- The hub made an attempt more than a day after the last arrival, and this receiver did not store
  that attempt.
- The hub kept a dead delivery for longer, because the webhook of the delivery was suspended.
"""

_PROOF_HEADERS = {
    "authorization",
    "cookie",
    "svix-signature",
    "webhook-signature",
    "x-forgejo-signature",
    "x-gitea-signature",
    "x-gitlab-token",
    "x-gogs-signature",
    "x-hub-signature",
    "x-hub-signature-256",
    "x-webhook-secret",
}

SCHEMA_VERSION = 2
_SCHEMA = f"""
BEGIN IMMEDIATE;
{{added}}
CREATE TABLE IF NOT EXISTS deliveries (
    path TEXT NOT NULL,
    id TEXT NOT NULL,
    headers TEXT NOT NULL,
    body BLOB NOT NULL,
    received_at REAL NOT NULL,
    attempts INTEGER NOT NULL DEFAULT 0,
    due_at REAL,  -- NULL once the handler has succeeded, or the delivery was given up
    repository TEXT,  -- deliveries of one repository are handled one after another
    died_at REAL,  -- when the delivery was given up
    failure TEXT,  -- how the last call of the handler failed
    PRIMARY KEY (path, id)
) STRICT;
CREATE INDEX IF NOT EXISTS deliveries_due ON deliveries (due_at) WHERE due_at IS NOT NULL;
CREATE INDEX IF NOT EXISTS deliveries_dead ON deliveries (died_at) WHERE died_at IS NOT NULL;
PRAGMA user_version = {SCHEMA_VERSION};
COMMIT;
"""
_ADDED_COLUMNS = {"repository": "TEXT", "died_at": "REAL", "failure": "TEXT"}
"""The columns that schema 2 has and schema 1 does not have."""


REVIVE_SQL = (
    "due_at = iif(died_at IS NULL, due_at, {now}), attempts = iif(died_at IS NULL, attempts, 0),"
    " died_at = NULL"
)
"""The SET part of an UPDATE, in which `{now}` stands for the present time. The UPDATE queues a dead
letter to be handled again, and sets the number of failed calls (`attempts`) to 0. If the row is not
a dead letter, this part of the UPDATE changes nothing."""


@dataclass(frozen=True, kw_only=True)
class NewDelivery:
    path: str
    """The path of the handler. The path and the id together identify a delivery."""
    id: str
    headers: dict[str, str]
    body: bytes
    repository: str | None = None
    """Deliveries of one repository to the same path are handled one after another. If the
    repository is None, the delivery waits for no other delivery."""


@dataclass(frozen=True, kw_only=True)
class StoredDelivery(NewDelivery):
    attempts: int
    """How many calls of the handler for this delivery have failed. When a dead letter is queued to
    be handled again, the count begins again with 0."""


@dataclass(frozen=True, kw_only=True)
class HandlerResult:
    """How one call of the handler for one delivery ended. If `due_at` and `died_at` are None, the
    call succeeded."""

    path: str
    id: str
    due_at: float | None = None
    """When to call the handler again. None if the handler is not called again."""
    died_at: float | None = None
    """When the delivery was given up. None if the delivery was not given up."""
    failure: str | None = None
    """How the call failed, in a few words. None if the call succeeded."""

    @property
    def succeeded(self) -> bool:
        return self.due_at is None and self.died_at is None


class DeliveryLog:
    """The open file. A lock on `<path>.lock` ensures that only one process at a time opens the file
    as a `DeliveryLog`. Only one thread at a time may call the methods. Times are seconds since the
    epoch.

    The constructor raises `ReceiverError` and leaves the file unchanged if another process has the
    lock, if a newer version of hotpush wrote the file, if the file is no SQLite database, or if its
    folder cannot be used. Also raises `ReceiverError` if SQLite cannot open the file, or cannot
    write the current schema to it. If the file already has the current schema, the constructor
    writes nothing to the file. So a receiver can start while the disk is full.
    """

    def __init__(self, path: Path) -> None:
        self._lock = FileLock(f"{path}.lock")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire(timeout=0)
        except Timeout as error:
            raise ReceiverError(
                f"Another receiver stores its deliveries in {path}: stop that receiver, or set"
                " `deliveries_path` to another file."
            ) from error
        except OSError as error:
            raise ReceiverError(
                f"Deliveries cannot be stored in {path}: {error.strerror or error}. Make its folder"
                " writable, or set `deliveries_path` to another file."
            ) from error
        try:
            # If a step fails, undo the steps before it. An open connection might keep a write
            # transaction open, so nobody else could write to the file.
            with contextlib.ExitStack() as undo:
                undo.callback(self._lock.release)
                version = _version(path)
                self._connection = _connect(path, synchronous="NORMAL")
                undo.callback(self._connection.close)
                if version < SCHEMA_VERSION:
                    added = _sql_to_add_columns(self._connection)
                    self._connection.executescript(_SCHEMA.format(added=added))
                self._synced_connection = _connect(path, synchronous="FULL")
                undo.pop_all()
        except sqlite3.Error as error:
            raise ReceiverError(
                f"Deliveries cannot be stored in {path}: {error}. Free disk space, set"
                " `deliveries_path` to another file, or move this file away."
            ) from error

    def close(self) -> None:
        self._synced_connection.close()
        self._connection.close()
        self._lock.release()

    def add(self, deliveries: Sequence[NewDelivery], now: float) -> list[bool]:
        """Store all deliveries, or none if the file cannot be written. Returns for each delivery
        whether it is new. If a sender repeats a dead letter, the delivery does not count as new,
        but its handler is called again.

        When this method returns, the deliveries are on disk.
        """
        keys = [(delivery.path, delivery.id) for delivery in deliveries]
        known = self._known(keys)
        # Use one statement for all rows, because each call of SQLite may cost much time: during the
        # call, this thread gives up Python's interpreter lock. If the thread of the event loop is
        # busy, this thread then waits a long time until it gets the lock again.
        rows = ", ".join(["(?, ?, ?, ?, ?, ?, ?)"] * len(deliveries))
        self._synced_connection.execute(
            "INSERT INTO deliveries (path, id, headers, body, repository, received_at, due_at)"
            f" VALUES {rows}"
            # The sender may repeat this delivery once more, so count KEPT_SECONDS from now.
            " ON CONFLICT DO UPDATE SET received_at = excluded.received_at,"
            # If the sender repeats a dead letter, handle it again.
            f" {REVIVE_SQL.format(now='excluded.due_at')}",
            [
                value
                for delivery in deliveries
                for value in (
                    *(delivery.path, delivery.id, _stored(delivery.headers), delivery.body),
                    *(delivery.repository, now, now),
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
        # Use a cross join, so that SQLite looks up each key in the index. With
        # `(path, id) IN (VALUES …)`, SQLite would read all rows.
        found = self._connection.execute(
            f"WITH asked (path, id) AS (VALUES {places})"
            " SELECT path, id FROM asked CROSS JOIN deliveries USING (path, id)",
            [part for key in keys for part in key],
        )
        return set(found)

    def due(
        self, now: float, paths: Collection[str], busy: Collection[tuple[str, str]] = ()
    ) -> list[StoredDelivery]:
        """Up to 100 deliveries to these paths that are due, oldest first. A delivery is due if its
        handler must be called now.

        A delivery is left out in two cases: an earlier delivery of the same path and repository
        waits for its next call, or `busy` contains the delivery's path and repository.
        """
        if not paths:
            return []
        is_busy = " AND (repository IS NULL OR NOT (path = ? AND repository = ?))" * len(busy)
        rows = self._connection.execute(
            # First list the path and repository of each delivery that waits for its next call
            # (`due_at` is in the future). SQLite makes this list only once. The list is short,
            # because few deliveries wait.
            "WITH waiting AS MATERIALIZED (SELECT path, repository, min(rowid) AS first"
            " FROM deliveries INDEXED BY deliveries_due"
            " WHERE due_at > ? AND repository IS NOT NULL GROUP BY path, repository)"
            # Name the index. Otherwise SQLite would use the index of the primary key
            # (`path`, `id`), and would also read all rows of deliveries that are already handled.
            " SELECT path, id, headers, body, repository, attempts"
            " FROM deliveries AS mine INDEXED BY deliveries_due"
            f" WHERE due_at <= ? AND path IN ({', '.join('?' * len(paths))}){is_busy}"
            " AND NOT EXISTS (SELECT 1 FROM waiting WHERE waiting.path = mine.path"
            " AND waiting.repository = mine.repository AND waiting.first < mine.rowid)"
            " ORDER BY rowid LIMIT 100",
            (now, now, *paths, *(part for pair in busy for part in pair)),
        )
        return [
            StoredDelivery(
                path=path,
                id=id,
                headers=json.loads(headers),
                body=body,
                repository=repository,
                attempts=attempts,
            )
            for path, id, headers, body, repository, attempts in rows
        ]

    def store_results(self, calls: Sequence[HandlerResult]) -> None:
        """Store the results of calls.

        After a successful call, the delivery's headers and body are deleted. Its path and id stay,
        so that a repeat is recognised. A delivery that was given up keeps its headers and body.

        This method does not wait for the disk. So a power cut may lose the results. The handlers
        are then called again. If this process dies without a power cut, no result is lost.
        """
        failed = [
            (call.due_at, call.died_at, call.failure, call.path, call.id)
            for call in calls
            if not call.succeeded
        ]
        handled = [(call.path, call.id) for call in calls if call.succeeded]
        self._connection.execute("BEGIN IMMEDIATE")
        with self._connection:
            self._connection.executemany(
                "UPDATE deliveries SET due_at = NULL, headers = '{}', body = x'', failure = NULL"
                " WHERE path = ? AND id = ?",
                handled,
            )
            self._connection.executemany(
                "UPDATE deliveries SET due_at = ?, died_at = ?, failure = ?,"
                " attempts = attempts + 1 WHERE path = ? AND id = ?",
                failed,
            )

    def next_due_at(self, now: float) -> float | None:
        """The earliest time after `now` at which the handler of a delivery must be called. None if
        no delivery waits for such a time."""
        due_at: float | None = self._connection.execute(
            "SELECT min(due_at) FROM deliveries WHERE due_at > ?", (now,)
        ).fetchone()[0]
        return due_at

    def forget(self, now: float) -> None:
        """Delete the handled deliveries that last arrived more than `KEPT_SECONDS` ago, and the
        dead letters that were given up more than `KEPT_SECONDS` ago."""
        before = now - KEPT_SECONDS
        self._connection.execute(
            "DELETE FROM deliveries WHERE due_at IS NULL AND received_at < ?"
            " AND (died_at IS NULL OR died_at < ?)",
            (before, before),
        )


def _sql_to_add_columns(connection: sqlite3.Connection) -> str:
    """The SQL statements that add the missing columns to a table of schema 1. Empty if there is no
    table yet."""
    present = {row[1] for row in connection.execute("PRAGMA table_info(deliveries)")}
    missing = {} if not present else {k: v for k, v in _ADDED_COLUMNS.items() if k not in present}
    return "".join(f"ALTER TABLE deliveries ADD COLUMN {k} {v};" for k, v in missing.items())


def _version(path: Path) -> int:
    """The version of the file's schema; 0 if there is no file or no schema yet."""
    if not path.exists():
        return 0
    try:
        version = _read_version(path, "ro")
    except sqlite3.OperationalError as error:
        if error.sqlite_errorname != "SQLITE_READONLY_ROLLBACK":
            raise
        # The file was not in WAL mode yet when a process was killed during a write. The process has
        # left a rollback journal. A read-only connection cannot roll this write back, so open the
        # file for writing.
        version = _read_version(path, "rw")
    if version > SCHEMA_VERSION:
        raise ReceiverError(
            f"{path} has schema {version}, but this version of hotpush knows schemas up to"
            f" {SCHEMA_VERSION}: a newer version of hotpush wrote the file. The file was not"
            " changed. Upgrade hotpush, or set `deliveries_path` to another file."
        )
    return version


def _read_version(path: Path, mode: Literal["ro", "rw"]) -> int:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    with contextlib.closing(sqlite3.connect(uri, uri=True)) as connection:
        version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version


def _connect(path: Path, *, synchronous: Literal["FULL", "NORMAL"]) -> sqlite3.Connection:
    connection = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
    try:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute(f"PRAGMA synchronous={synchronous}")
        # At a checkpoint, SQLite copies the pages of the write-ahead log into the file. Senders
        # must wait until the checkpoint ends. So make checkpoints rare: one after 10,000 pages
        # (40 MB).
        connection.execute("PRAGMA wal_autocheckpoint=10000")
    except BaseException:
        connection.close()
        raise
    return connection


def _stored(headers: Mapping[str, str]) -> str:
    return json.dumps(
        {name: value for name, value in headers.items() if name not in _PROOF_HEADERS}
    )
