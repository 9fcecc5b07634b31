"""A launcher and the folder of one job."""

import os
import sys
from pathlib import Path
from typing import Any

from jobs.folder import LOG, PROCESS, read_json
from jobs.launcher import Launch, Status
from jobs.launchers.local import LocalLauncher
from tests.jobs_fixtures import pids_in, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


class Bench:
    """A launcher and the folder of one job."""

    def __init__(self, jobs_dir: Path, preload: tuple[str, ...]) -> None:
        self.jobs_dir = jobs_dir
        self.preload = preload
        self.launcher = self.another()
        self.job_dir = jobs_dir / "j000001"
        self.job_dir.mkdir()
        self.log = self.job_dir / LOG
        self.handles: list[str] = []

    def another(self) -> LocalLauncher:
        return LocalLauncher(self.jobs_dir, preload=self.preload, environment=ENVIRONMENT)

    def launch(self, *arguments: str, attempt: int = 1, **changes: Any) -> Launch:
        values = {
            "job_id": "j000001",
            "attempt": attempt,
            "command": (sys.executable, "-m", "tests.jobs_program", *arguments),
            "env": ENVIRONMENT,
            "job_dir": self.job_dir,
            "niceness": 10,
        }
        return Launch(**{**values, **changes})

    def start(self, *arguments: str, attempt: int = 1, **changes: Any) -> str:
        handle = self.launcher.start(self.launch(*arguments, attempt=attempt, **changes))
        self.handles.append(handle)
        return handle

    def ended(self, handle: str) -> Status:
        def ask() -> Status | None:
            self.launcher.poll_processes()
            status = self.launcher.poll(handle)
            return status if status.phase in ("exited", "vanished") else None

        status = until(ask)
        assert status is not None
        return status

    def running(self, handle: str) -> None:
        def ask() -> bool:
            self.launcher.poll_processes()
            return self.launcher.poll(handle).phase == "running"

        until(ask)

    def pids(self, count: int) -> list[int]:
        """Those that the job wrote to its log."""
        return pids_in(self.log, count, meanwhile=self.launcher.poll_processes)

    def leader(self) -> int:
        record = read_json(self.job_dir / PROCESS)
        assert record is not None
        return int(record["pid"])

    def close(self) -> None:
        for handle in self.handles:
            self.launcher.stop(handle, force=True)
            self.ended(handle)
        self.launcher.close()
