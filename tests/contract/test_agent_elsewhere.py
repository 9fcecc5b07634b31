"""Agents elsewhere: real agents, the routes of a real hub, a runner whose launcher is a shell, and
no folder that both sides know."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.folder import LOG
from jobs.job import Job, attempt_token, seal, start_ticket
from jobs.launcher import Launcher, LauncherSettings
from jobs.runner import Runner
from jobs.spec import JOB_TICKET, JobSpec
from jobs.store import JobStore
from pipeline.hub.service import Elsewhere
from tests.hub_fixtures import SECRET_KEY, RunningHub, running_hub
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS, program
from tests.jobs_fixtures import is_gone, pids_in, until

ROOT = Path(__file__).parents[2]
LOG_BYTES = int(os.environ.get("TEST_LOG_BYTES", 250_000_000))
AGENT = (sys.executable, "-m", "jobs.agent")


class Site:
    """A hub, a runner, and an engine elsewhere whose names are files with the pid of an agent."""

    def __init__(self, folder: Path, hub: RunningHub, store: JobStore) -> None:
        self.hub, self.store = hub, store
        self.jobs_dir = hub.root.with_name("jobs")
        self.engine = folder / "engine"
        self.engine.mkdir()
        self.stop = threading.Event()
        # The temporary folder of the agents is theirs alone.
        variables = f"TMPDIR={self.engine} PYTHONPATH={ROOT}"
        start = f'cd / && {variables} "$@" 2>>{self.engine}/errors & echo $! > $0'
        name = f"{self.engine}/$name"
        settings = LauncherSettings(
            submit=("sh", "-c", start.replace("$", "$$"), name, "$agent"),
            status=("sh", "-c", 'test -e $$0 && kill -0 "$$(cat $$0)" && echo LIVE; true', name),
            cancel=("sh", "-c", 'kill "$$(cat $$0)" || true', name),
            states={"running": "LIVE", "unknown": ()},
            agent=AGENT,
        )
        self.launcher = Launcher(settings)

    def run(self) -> None:
        runner = Runner(
            self.store,
            self.jobs_dir.with_name("of the runner"),
            SETTINGS.model_copy(update={"retry_seconds": 0.1}),
            ENVIRONMENT,
            launchers={"shell": self.launcher},
            hub_url=self.hub.url,
            secret_key=SECRET_KEY,
        )
        runner.run(self.stop)

    def submit(self, *arguments: str, **values: Any) -> Job:
        return self.store.submit(program(*arguments, launcher="shell", **values))

    def ended(self, job: Job) -> Job:
        def ask() -> Job | None:
            now = self.store.get(job.id)
            return now if now.has_ended else None

        found = until(ask)
        assert found is not None
        return found

    def log(self, job: Job) -> Path:
        return self.jobs_dir / job.id / LOG

    def call(self, job: Job, call: str, token: str, **body: Any) -> httpx.Response:
        url = f"{self.hub.url}/api/jobs/{job.id}/attempts/{job.attempt}/{call}"
        return httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"})


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "hub's"
    folder.mkdir()
    with (
        JobStore.open(tmp_path / "jobs.db") as store,
        running_hub(
            folder / "hub", jobs_store=store, elsewhere=Elsewhere(settings=SETTINGS)
        ) as hub,
    ):
        yield Site(tmp_path, hub, store)


@pytest.fixture
def running(site: Site) -> Iterator[Site]:
    thread = threading.Thread(target=site.run)
    thread.start()
    yield site
    for job in site.store.list():
        site.store.cancel(job.id)
    until(lambda: not site.store.has_open_jobs())
    site.stop.set()
    thread.join()


def test_a_job_runs_elsewhere_and_all_that_it_leaves_comes_back(running: Site) -> None:
    job = running.submit(
        "write_outcome", "promoted", "0", sealed_env=seal({"SECRET": "s3cret"}, SECRET_KEY)
    )
    ended = running.ended(job)
    assert ended.outcome is not None and ended.outcome.result == "promoted", ended.outcome
    assert json.loads((running.log(job).parent / "outcome.json").read_text())["release"]
    job = running.submit("show_environment", sealed_env=seal({"SECRET": "s3cret"}, SECRET_KEY))
    assert running.ended(job).state == "COMPLETED"
    shown = json.loads(running.log(job).read_text())
    assert shown["SECRET"] == "s3cret" and shown["HF_ENDPOINT"] == running.hub.url
    assert JOB_TICKET not in shown
    until(lambda: not Path(shown["JOB_DIR"]).exists())


def test_the_log_arrives_while_the_job_runs_and_a_cancelled_job_ends(running: Site) -> None:
    job = running.submit("sleep_until_stopped")
    (pid,) = pids_in(running.log(job))
    running.store.cancel(job.id)
    assert running.ended(job).state == "CANCELED"
    until(lambda: is_gone(pid))


def test_an_agent_that_is_killed_is_replaced_and_its_engine_says_why(running: Site) -> None:
    job = running.submit("wait_for", "go", "0")
    pids_in(running.log(job))
    handle = running.store.get(job.id).handle
    assert handle is not None
    os.kill(int(handle.split()[1]), signal.SIGKILL)
    again = until(lambda: ((now := running.store.get(job.id)).attempt == 2 and now) or None)
    assert again is not None and again.num_lost == 1
    until(lambda: (running.store.get(job.id).handle or handle) != handle)


def test_an_agent_that_its_engine_stops_has_lost_its_attempt(running: Site) -> None:
    job = running.submit("wait_for", "go", "0", max_attempts=1)
    pids_in(running.log(job))
    (name,) = running.engine.glob("hotpush-j*-*")
    os.kill(int(name.read_text()), signal.SIGTERM)
    assert running.ended(job).state == "ERROR"


def test_without_the_launcher_a_job_fails(running: Site) -> None:
    job = running.store.submit(JobSpec(command=("true",), launcher="gone", max_attempts=1))
    outcome = running.ended(job).outcome
    assert outcome is not None and "has no launcher 'gone'" in str(outcome.reason)


def test_an_engine_that_starts_nothing_fails_the_job_with_its_words(site: Site) -> None:
    settings = site.launcher.settings.model_copy(
        update={"submit": ("sh", "-c", "echo no such queue >&2; exit 4")}
    )
    site.launcher = Launcher(settings)
    job = site.submit("wait_for", "go", "0", max_attempts=2)
    thread = threading.Thread(target=site.run)
    thread.start()
    outcome = site.ended(job).outcome
    site.stop.set()
    thread.join()
    assert outcome is not None and outcome.stage == "launch"
    assert "no such queue" in str(outcome.reason)


def test_an_attempt_of_a_runner_elsewhere_is_not_given_up_because_this_engine_lacks_it(
    site: Site,
) -> None:
    job = site.submit("wait_for", "go", "0")
    assert site.store.claim("another-machine 1 boot+1/ab.1", 0.1)
    asked = site.engine / "asked"
    count = ("sh", "-c", f"echo >> {asked}")  # knows no name
    site.launcher = Launcher(site.launcher.settings.model_copy(update={"status": count}))
    thread = threading.Thread(target=site.run)
    thread.start()
    until(lambda: asked.exists() and asked.stat().st_size >= 3)
    site.stop.set()
    thread.join()
    waiting = site.store.get(job.id)
    assert waiting.attempt == 1 and waiting.waits_for == "no agent has begun on shell yet"


def test_a_ticket_starts_one_agent_and_the_token_of_an_old_attempt_does_nothing(site: Site) -> None:
    site.submit("wait_for", "go", "0")
    job = site.store.claim("me", 60)
    assert job is not None
    ticket = start_ticket(job, SECRET_KEY)
    assert site.call(job, "beat", ticket).status_code == 401
    assert site.call(job, "start", "no ticket", handle="a 1 b").status_code == 401
    first = site.call(job, "start", ticket, handle="a 1 b")
    assert first.status_code == 200
    again = site.call(job, "start", ticket, handle="a 1 b")  # the answer may have been lost
    assert again.json()["token"] == first.json()["token"]
    assert site.call(job, "start", ticket, handle="another 2 b").status_code == 409
    token = first.json()["token"]
    assert token == attempt_token(job, SECRET_KEY)
    for _ in range(2):  # the first answer may be lost
        assert site.call(job, f"beat?name={LOG}&offset=3", token).json()["cancel"] is False
    assert site.log(job).read_bytes() == b"\0\0\0{}"
    for name in ("../x", "spec.json"):
        assert site.call(job, f"beat?name={name}", token).status_code == 400
        assert site.call(job, "finish", token, records={name: ""}).status_code == 400
    site.store.release(job.id, "me")
    assert site.call(job, "start", ticket, handle="a 1 b").status_code == 409
    for call in ("beat", "finish"):
        assert site.call(job, call, token).status_code == 409


@pytest.mark.slow
def test_a_large_log_arrives(running: Site) -> None:
    script = f"head -c {LOG_BYTES} /dev/zero | tr '\\0' 'x'"
    job = running.store.submit(
        program().model_copy(update={"command": ("sh", "-c", script), "launcher": "shell"})
    )
    assert until(lambda: running.store.get(job.id).has_ended, seconds=240)
    assert running.log(job).stat().st_size == LOG_BYTES
