"""Runners in threads and processes, with a store and a folder for their jobs."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.folder import LOG
from jobs.job import Job
from jobs.launcher import Launcher
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec
from jobs.store import JobStore
from tests.jobs_fixtures import until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
SETTINGS = JobsSettings(
    max_running=4, lease_seconds=1.0, heartbeat_seconds=0.2, kill_grace_seconds=0.5
)


def program(*arguments: str, pipeline: str | None = "faq", **values: Any) -> JobSpec:
    command = (sys.executable, "-m", "tests.jobs_program", *arguments)
    return JobSpec(**{"command": command, "pipeline": pipeline, **values})


def run_runner(
    location: str,
    jobs_dir: Path,
    launcher: Launcher,
    hub_url: str,
    secret_key: bytes,
    stop: threading.Event | None = None,
) -> None:
    """A runner with the launcher `shell`, in this thread or process."""
    with JobStore.open(location) as store:
        runner = Runner(
            store,
            jobs_dir,
            SETTINGS.model_copy(update={"retry_seconds": 0.1}),
            ENVIRONMENT,
            launchers={"shell": launcher},
            hub_url=hub_url,
            secret_key=secret_key,
        )
        runner.run(stop or threading.Event())


class House:
    """A store, a folder for jobs, and runners in threads and processes."""

    def __init__(self, folder: Path, url: str) -> None:
        self.url = url
        self.jobs_dir = folder / "jobs"
        self.store = JobStore.open(url)
        self._stops: list[tuple[threading.Event, threading.Thread]] = []
        self._processes: list[subprocess.Popen[bytes]] = []

    def run(
        self, settings: JobsSettings = SETTINGS, **environment: str
    ) -> tuple[Runner, threading.Event, threading.Thread]:
        """A runner in a thread; returns what stops it."""
        store = JobStore.open(self.url)
        runner = Runner(store, self.jobs_dir, settings, {**ENVIRONMENT, **environment})
        stop = threading.Event()

        def work() -> None:
            with store:
                runner.run(stop)

        thread = threading.Thread(target=work)
        thread.start()
        self._stops.append((stop, thread))
        return runner, stop, thread

    def run_process(self, *preload: str) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.jobs_runner_process", self.url, self.jobs_dir, *preload],
            env=ENVIRONMENT,
        )
        self._processes.append(process)
        return process

    def ended(self, job: Job) -> Job:
        def ask() -> Job | None:
            now = self.store.get(job.id)
            return now if now.has_ended else None

        ended = until(ask)
        assert ended is not None
        return ended

    def log(self, job: Job) -> Path:
        return self.jobs_dir / job.id / LOG

    def close(self) -> None:
        for job in self.store.list():
            self.store.cancel(job.id)
        for stop, _ in self._stops:
            stop.set()
        for _, thread in self._stops:
            thread.join()
        for process in self._processes:
            process.terminate()
            process.wait()
        self.store.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    house = House(tmp_path, f"sqlite:///{tmp_path / 'jobs.db'}")
    yield house
    house.close()
