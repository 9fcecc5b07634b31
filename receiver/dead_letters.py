"""Lists dead letters, and queues them to be handled again.

A dead letter is a delivery that the receiver has stored and then given up, because too many calls
of its handler failed (`receiver/durable.py`). (For hotpush's hub, a *dead* delivery is something
else: the hub has given up sending it.) The functions of this module can be called while the
receiver runs. The receiver finds the queued dead letters within seconds.
"""

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from receiver.delivery_log import REVIVE_SQL, SCHEMA_VERSION
from receiver.errors import ReceiverError

BUSY_SECONDS = 10.0
"""How long to wait while the receiver has locked the file."""


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """Times are seconds since the epoch."""

    path: str
    """The path of the handler."""
    id: str
    """The id of the delivery."""
    repository: str | None
    """The repository of the event. None if the delivery was stored without a repository."""
    received_at: float
    """When the delivery last arrived."""
    died_at: float
    """When the receiver gave up the delivery."""
    attempts: int
    """How many calls of the handler for this delivery have failed. If the delivery was already a
    dead letter earlier, only the calls since it was queued again count."""
    failure: str | None
    """How the last call of the handler failed."""
    body: str


def list_dead_letters(file: Path) -> list[DeadLetter]:
    """All dead letters, in the order in which they were given up. Raises ReceiverError if the file
    cannot be read."""
    with _opened(file, "ro") as connection:
        rows = connection.execute(
            "SELECT path, id, repository, received_at, died_at, attempts, failure, body"
            " FROM deliveries WHERE died_at IS NOT NULL ORDER BY died_at, rowid"
        ).fetchall()
    return [
        DeadLetter(
            path=row[0],
            id=row[1],
            repository=row[2],
            received_at=row[3],
            died_at=row[4],
            attempts=row[5],
            failure=row[6],
            body=bytes(row[7]).decode(errors="replace"),
        )
        for row in rows
    ]


def replay_dead_letters(file: Path, ids: Sequence[str] | None, now: float) -> list[str]:
    """Queue the dead letters with these ids, so that the receiver handles them again. If `ids` is
    None, queue all dead letters. Returns the ids of the queued dead letters. `now` is in seconds
    since the epoch.

    If one of `ids` is not the id of a dead letter, or if the file cannot be used, raises
    ReceiverError and changes nothing.
    """
    with _opened(file, "rw") as connection:
        connection.execute("BEGIN IMMEDIATE")
        dead = "died_at IS NOT NULL"
        known = [id for (id,) in connection.execute(f"SELECT id FROM deliveries WHERE {dead}")]
        for id in known if ids is None else ids:
            if id not in known:
                raise ReceiverError(
                    f"{id!r} is no dead letter in {file}; `pipeline receiver dead` lists the dead"
                    " letters."
                )
            connection.execute(
                f"UPDATE deliveries SET {REVIVE_SQL.format(now='?')} WHERE id = ? AND {dead}",
                (now, id),
            )
        connection.execute("COMMIT")
    return list(dict.fromkeys(known if ids is None else ids))


@contextlib.contextmanager
def _opened(file: Path, mode: Literal["ro", "rw"]) -> Iterator[sqlite3.Connection]:
    if not file.exists():
        raise ReceiverError(
            f"{file} does not exist, so no delivery was stored there. If the receiver's"
            " `deliveries_path` is another file, give the other file with --file."
        )
    try:
        uri = f"{file.absolute().as_uri()}?mode={mode}"
        with contextlib.closing(
            sqlite3.connect(uri, uri=True, isolation_level=None, timeout=BUSY_SECONDS)
        ) as connection:
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version != SCHEMA_VERSION:
                raise ReceiverError(
                    f"{file} has schema {version}, but this version of hotpush can read only schema"
                    f" {SCHEMA_VERSION}. If the schema of the file is older, start the receiver"
                    " once: it upgrades the file. If the schema is newer, upgrade hotpush."
                )
            yield connection
    except sqlite3.Error as error:
        raise ReceiverError(f"{file} cannot be used: {error}.") from error
