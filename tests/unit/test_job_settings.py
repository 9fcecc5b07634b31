"""How jobs are run, and where bad settings are refused."""

import os
import threading
from pathlib import Path

import pytest
from pydantic import ValidationError

from jobs.errors import LaunchError
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.store import JobStore


def test_a_job_may_use_all_cores() -> None:
    assert JobsSettings().threads() == len(os.sched_getaffinity(0))
    assert JobsSettings(num_threads=7).threads() == 7


@pytest.mark.parametrize(
    "values",
    [{"max_running": 0}, {"lease_seconds": 0}, {"num_threads": 0}, {"max_runing": 2}],
)
def test_a_bad_setting_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(values))):
        JobsSettings.model_validate(values)


def test_a_lease_outlasts_its_heartbeats() -> None:
    with pytest.raises(ValidationError, match="heartbeat_seconds"):
        JobsSettings(lease_seconds=2.0, heartbeat_seconds=2.0)


def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with JobStore.open(tmp_path / "jobs.db") as store:
        runner = Runner(store, tmp_path / "file" / "jobs", JobsSettings(), {})
        with pytest.raises(LaunchError, match=r"file/jobs: Not a directory"):
            runner.run(threading.Event(), until_idle=True)
