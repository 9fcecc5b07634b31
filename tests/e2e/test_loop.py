"""The stack as a user meets it: pushes, completions, jobs by hand, rollback, faults."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.jobs_fixtures import new_database, postgres_server
from tests.ports import free_port
from tests.stack_fixtures import (
    Workplace,
    clone,
    configure,
    end_with_this_process,
    facts,
    findings,
    stack_up,
    workplace,
)

__all__ = ["postgres_server", "workplace"]


def served(workplace: Workplace) -> str:
    answer = httpx.post(
        f"{workplace.url('serving')}/v1/completions",
        json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4, "temperature": 0},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    body = answer.json()
    assert answer.headers["X-Model-Release"] == body["system_fingerprint"]
    return str(body["system_fingerprint"])


@contextmanager
def runner_elsewhere(workplace: Workplace) -> Iterator[Path]:
    """A runner with a folder of its own, to which what docs/cluster.md names was copied; the state
    folder. Jobs find the releases of the stack, as on a shared disk."""
    home = workplace.folder / "elsewhere" / ".pipeline"
    home.mkdir(parents=True)
    shutil.copy(workplace.home / "tokens.json", home)
    shutil.copy(workplace.folder / "pipeline.toml", home.parent)
    own = {
        "HOME": str(home.parent),
        "PIPELINE_HOME": str(home),
        "PIPELINE_SETTINGS": str(home.parent / "pipeline.toml"),
        "PIPELINE_JOBS__METRICS_PORT": str(free_port()),
    }
    with (workplace.home / "logs" / "runner elsewhere.log").open("wb") as log:
        runner = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "runner"],
            cwd=home.parent,
            env={**workplace.env, **own},
            stdout=log,
            stderr=log,
            preexec_fn=end_with_this_process,
        )
    try:
        yield home
    finally:
        runner.terminate()
        runner.wait(60)


@pytest.mark.slow
def test_a_runner_elsewhere_and_one_postgres_for_jobs_and_hub(
    workplace: Workplace, postgres_server: str
) -> None:
    configure(workplace)
    url = new_database(postgres_server)
    settings = workplace.folder / "pipeline.toml"
    databases = f'[jobs]\ndatabase_url = "{url}"\n[hub]\ndatabase = "{url}"\n'
    settings.write_text(f"{databases}\n{settings.read_text()}")
    with (
        stack_up(workplace, "--only", "hub,receiver,serve"),
        runner_elsewhere(workplace) as elsewhere,
    ):
        checkout = clone(workplace)
        job = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 80)}))
        assert job["outcome"]["result"] == "promoted", f"{job}\n{workplace.logs()}"
        assert served(workplace) == job["outcome"]["release"]
        assert (elsewhere / "jobs" / job["id"] / "evaluation.json").exists()
        job = workplace.wait_for_job(checkout.push({"README.md": "# Shelves\n"}))
        assert job["outcome"]["result"] == "unchanged"
        assert findings(workplace, code=0) == {}
    assert not list(workplace.home.glob("jobs/*"))
    assert not list(workplace.folder.rglob("*.sqlite*"))


def test_rollback_and_swap_choose_what_is_served(workplace: Workplace) -> None:
    configure(workplace)
    with stack_up(workplace):
        checkout = clone(workplace)
        workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 80)}))
        first = served(workplace)
        workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 100)}))
        second = served(workplace)
        assert second != first
        workplace.run("releases", "rollback")
        assert served(workplace) == first
        assert [row["id"] for row in workplace.json("releases", "ls") if row["served"]] == [first]
        workplace.run("releases", "swap", second)
        assert served(workplace) == second
