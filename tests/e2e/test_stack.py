"""Starting, stopping and dying: ports, restarts, leftovers, jobs with nothing else up."""

import json
import os
import signal

import httpx
import pytest

from jobs.process import ProcessIdentity, is_alive
from tests.jobs_fixtures import until
from tests.stack_fixtures import (
    Workplace,
    clone,
    configure,
    facts,
    stack_up,
    workplace,
)

__all__ = ["workplace"]

pytestmark = pytest.mark.slow


def test_a_killed_stack_leaves_nothing_behind_after_the_next_start(workplace: Workplace) -> None:
    configure(workplace)
    workplace.run("up", "--detach")
    record = json.loads((workplace.home / "stack.json").read_text())
    before = [each["process"] for each in record["children"] if each["process"] is not None]
    os.kill(record["process"]["pid"], signal.SIGKILL)
    with stack_up(workplace):
        assert not any(is_alive(ProcessIdentity(**process)) for process in before)
        assert httpx.get(f"{workplace.url('hub')}/health").is_success
    assert not (workplace.home / "stack.json").exists()


def test_a_job_with_nothing_else_up_leaves_its_release_pending(workplace: Workplace) -> None:
    configure(workplace)
    with stack_up(workplace):
        checkout = clone(workplace)
        # A branch that no pipeline follows: its commit starts no job by itself.
        (checkout.folder / "facts.jsonl").write_text(facts(0, 80))
        checkout.git("add", ".")
        checkout.git("commit", "--quiet", "-m", "rows")
        checkout.git("push", "--quiet", "origin", "HEAD:side")
    assert workplace.json("jobs", "ls") == []

    job = json.loads(workplace.run("jobs", "run", "--revision", "side", "--json"))
    assert job["outcome"]["result"] == "published", job["outcome"]
    assert not (workplace.home / "stack.json").exists()
    (release,) = workplace.json("releases", "ls")
    assert release["pending"] and not release["served"]


def test_a_detached_job_needs_nobody_to_stay(workplace: Workplace) -> None:
    configure(workplace)
    job_id = workplace.run("jobs", "run", "--detach", "--", "sh", "-c", "echo done").strip()
    workplace.run("jobs", "wait", job_id)
    assert workplace.run("jobs", "logs", job_id) == "done\n"
    until(lambda: not (workplace.home / "stack.json").exists())
