"""What nobody foresaw ends no worker of the hub: it is logged, counted, and the work goes on.

The fault is real: the schema of the hub's file is damaged behind its back.
"""

import contextlib
import logging
import re
import sqlite3
from pathlib import Path

import pytest

from pipeline.hub import deliveries
from tests.hub_fixtures import Receiver, RunningHub, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "user", "name": "local"}]


def change_index(hub: RunningHub, definition: str) -> str:
    """How the index of pending deliveries was defined before."""
    of_index = "FROM sqlite_schema WHERE name = 'deliveries_pending'"
    with contextlib.closing(sqlite3.connect(hub.root / "hub.sqlite")) as file, file:
        file.execute("PRAGMA writable_schema = ON")
        (before,) = file.execute(f"SELECT sql {of_index}").fetchone()
        file.execute(
            "UPDATE sqlite_schema SET sql = ? WHERE name = 'deliveries_pending'", (definition,)
        )
        # The hub's connections read the schema anew when this has changed.
        (version,) = file.execute("PRAGMA schema_version").fetchone()
        file.execute(f"PRAGMA schema_version = {version + 1}")
    return str(before)


def test_a_dispatcher_that_meets_a_damaged_file_goes_on_when_it_is_repaired(
    receiver: Receiver,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(deliveries, "BROKEN_OFF_SECONDS", 0.02)
    receiver.answers = [(503, {})]
    with (
        caplog.at_level(logging.ERROR, "pipeline.hub.deliveries"),
        running_hub(tmp_path / "hub", delivery_schedule_seconds=(0, 2)) as hub,
    ):
        id = hub.api.create_webhook(url=receiver.url, watched=WATCHED).id
        hub.create_dataset("local/facts")
        wait_until(lambda: hub.deliveries(id)[0]["attempt"] == 1)
        # The dispatcher looks for what is due when the next attempt is.
        whole = change_index(hub, "CREATE INDEX nonsense")
        wait_until(lambda: [each.name for each in caplog.records].count(deliveries.__name__) >= 2)
        change_index(hub, whole)
        wait_until(lambda: hub.deliveries(id)[0]["status"] == "delivered")
        counted = r'hub_worker_failures_total\{worker="dispatcher"\} ([\d.]+)'
        [failures] = re.findall(counted, hub.request("GET", "/metrics").text)
    assert float(failures) >= 2
    assert "malformed database schema" in caplog.text
