"""Two runners with one store, on both databases: what each of them takes, and what the other one
does when it is gone."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.process import identify, name_of
from tests.integration.test_job_runner_takeover import agent_of
from tests.job_runner_fixtures import House, program
from tests.jobs_fixtures import pids_in, postgres_server, store_url, until

__all__ = ["postgres_server", "store_url"]


@pytest.fixture
def shared(tmp_path: Path, store_url: str) -> Iterator[House]:
    house = House(tmp_path, store_url)
    yield house
    house.close()


def test_two_runners_run_each_job_once_and_one_takes_over_from_a_killed_one(shared: House) -> None:
    killed, _ = shared.run_process(), shared.run_process()
    me = identify(killed.pid)
    assert me is not None
    # More than one runner may run.
    jobs = [shared.store.submit(program("wait_for", "go", "0", pipeline=f"p{n}")) for n in range(5)]
    until(lambda: all(job.owner for job in shared.store.list()))
    for job in jobs:
        pids_in(shared.log(job))
    of_killed = [each for each in shared.store.list() if str(each.owner).startswith(name_of(me))]
    assert 1 <= len(of_killed) <= 4
    agent = agent_of(shared, of_killed[0])
    killed.kill()
    killed.wait()
    os.kill(agent, signal.SIGKILL)
    for job in jobs:
        (shared.jobs_dir / job.id / "go").touch()
    for job in jobs:
        ended = shared.ended(job)
        attempts = 2 if job.id == of_killed[0].id else 1
        assert (ended.state, ended.attempt) == ("COMPLETED", attempts)
        assert len(pids_in(shared.log(job))) == attempts
