"""The checks of `pipeline doctor` for deliveries that the hub has given up. Also finds
out whether a delivery of a commit started a job (`got_job`)."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing

from pipeline.findings import Finding, ok, wrong
from pipeline.paths import Home
from pipeline.settings import Settings


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
        hours = settings.hub.refused_give_up_seconds / 3600
        yield wrong(
            "deliveries",
            f"{dead} were given up: every attempt failed, or connections were refused for "
            f"{hours:g} hours",
            "to see why: pipeline webhooks deliveries; to send a delivery again: pipeline webhooks "
            "replay",
        )
    else:
        yield ok("deliveries", f"{counts.get('pending', 0)} pending, none given up")


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
