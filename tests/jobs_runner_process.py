"""A runner in a process of its own, for tests that kill it: `… DATABASE JOBS_DIR [MODULE…]`."""

import os
import signal
import sys
import threading
from pathlib import Path

from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.store import JobStore

SETTINGS = JobsSettings(
    lease_seconds=5.0, heartbeat_seconds=0.2, kill_grace_seconds=1.0, max_running=4
)


def main(database: str, jobs_dir: str, *preload: str) -> None:
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    with JobStore.open(database) as store:
        settings = SETTINGS.model_copy(update={"preload": preload})
        Runner(store, Path(jobs_dir), settings, os.environ).run(stop)


if __name__ == "__main__":
    main(*sys.argv[1:])
