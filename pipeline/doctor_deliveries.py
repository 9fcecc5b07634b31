"""The checks of `pipeline doctor` for deliveries that the hub or the receiver has given up. Also
finds out whether a delivery of a commit started a job (`got_job`)."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

from pipeline.findings import Finding, ok, wrong
from pipeline.paths import Home
from pipeline.services import deliveries_path
from pipeline.settings import Settings
from receiver.dead_letters import list_dead_letters
from receiver.errors import ReceiverError


def check_deliveries(home: Home, settings: Settings) -> Iterator[Finding]:
    database = home.hub_dir / "hub.sqlite"
    if not database.exists():
        return
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            rows = connection.execute(
                "SELECT status, count(*) FROM deliveries WHERE status <> 'delivered' GROUP BY 1"
            ).fetchall()
    except sqlite3.Error as error:
        yield wrong("deliveries", f"{database}: {error}", "restore it from a backup")
        return
    counts = dict(rows)
    if dead := counts.get("dead", 0):
        yield wrong(
            "deliveries",
            f"{dead} were given up, because every attempt failed",
            "to see why: pipeline webhooks deliveries; to send a delivery again: pipeline webhooks "
            "replay",
        )
    else:
        yield ok("deliveries", f"{counts.get('pending', 0)} pending, none given up")


def check_dead_letters(home: Home, settings: Settings) -> Iterator[Finding]:
    file = deliveries_path(settings, home)
    if not file.exists():
        return
    try:
        letters = list_dead_letters(file)
    except ReceiverError as error:
        yield wrong("dead letters", str(error), "do what the message says")
        return
    if letters:
        handlers = ", ".join(sorted({letter.path for letter in letters}))
        yield wrong(
            "dead letters",
            f"the receiver has {len(letters)}: deliveries that it has given up, because the "
            f"handler failed again and again ({handlers})",
            "to see why: pipeline receiver dead; to handle them again: pipeline receiver replay "
            "--all",
        )
    else:
        yield ok("dead letters", "none")


def got_job(home: Home, commit: str) -> bool:
    """Whether the hub delivered an event that moved a ref to `commit`, and the receiver answered
    with a job's id. False if the hub's database cannot be read. `check_deliveries` reports this
    error, unless the file of the database is missing."""
    database = home.hub_dir / "hub.sqlite"
    try:
        with closing(sqlite3.connect(f"{database.as_uri()}?mode=ro", uri=True)) as connection:
            found = connection.execute(
                "SELECT 1 FROM deliveries WHERE status = 'delivered' "
                "AND instr(payload, ?) "
                "AND response_head LIKE '{\"job\":%' LIMIT 1",
                (f'"newSha":"{commit}"',),
            )
            return found.fetchone() is not None
    except sqlite3.Error:
        return False
