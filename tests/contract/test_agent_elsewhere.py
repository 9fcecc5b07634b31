"""Agents elsewhere: real agents, the routes of a real hub, a runner whose launcher is a shell, and
no folder that both sides know.

`TEST_LOG_BYTES` is the size of the large log, for example 1000000000.
"""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from jobs.folder import LOG
from jobs.job import Job, attempt_token, seal, start_ticket
from jobs.launcher import Launcher, LauncherSettings
from jobs.spec import JOB_TICKET, JobSpec
from jobs.store import JobStore
from pipeline.hub.service import Elsewhere
from pipeline.paths import Home
from pipeline.retrain.elsewhere import CHOSEN
from pipeline.retrain.run import promote
from pipeline.runner.elsewhere import jobs_elsewhere
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import Tokens
from serving.weights.release_store import set_current
from tests.contract.test_release_revisions import uploaded
from tests.echo_engine import EchoEngine
from tests.hub_fixtures import SECRET_KEY, TOKEN, RunningHub, running_hub
from tests.job_runner_fixtures import SETTINGS, program, run_runner
from tests.jobs_fixtures import is_gone, pids_in, until
from tests.ports import free_port
from tests.retrain_fixtures import DATASET, Pipeline, facts, few_anchors, jsonl, tiny_base
from tests.serving_fixtures import ADMIN_TOKEN, echo_app, echo_release
from tests.serving_fixtures import running as running_server

ROOT = Path(__file__).parents[2]
LOG_BYTES = int(os.environ.get("TEST_LOG_BYTES", 250_000_000))
MEMORY_BYTES = 150_000_000
"""What the agent with the large log may allocate."""
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

    @property
    def of_runner(self) -> tuple[str, Path, Launcher, str, bytes]:
        folder = self.jobs_dir.with_name("of the runner")
        return self.store.location, folder, self.launcher, self.hub.url, SECRET_KEY

    def run(self) -> None:
        run_runner(*self.of_runner, self.stop)

    @contextmanager
    def running(self) -> Iterator[None]:
        """With a runner, which ends with the jobs."""
        thread = threading.Thread(target=self.run)
        thread.start()
        try:
            yield
        finally:
            for job in self.store.list():
                self.store.cancel(job.id)
            until(lambda: not self.store.has_open_jobs())
            self.stop.set()
            thread.join()

    def submit(self, *arguments: str, **values: Any) -> Job:
        return self.store.submit(program(*arguments, launcher="shell", **values))

    def ended(self, job: Job, seconds: float = 30.0) -> Job:
        def ask() -> Job | None:
            now = self.store.get(job.id)
            return now if now.has_ended else None

        return until(ask, seconds)

    def log(self, job: Job) -> Path:
        return self.jobs_dir / job.id / LOG

    def call(self, job: Job, call: str, token: str, **body: Any) -> httpx.Response:
        url = f"{self.hub.url}/api/jobs/{job.id}/attempts/{job.attempt}/{call}"
        return httpx.post(url, json=body, headers={"Authorization": f"Bearer {token}"})


def hub_in(
    tmp_path: Path, store: JobStore, elsewhere: Elsewhere | None = None, **hub: Any
) -> AbstractContextManager[RunningHub]:
    elsewhere = elsewhere or Elsewhere(settings=SETTINGS)
    return running_hub(tmp_path / "hub's/hub", jobs_store=store, elsewhere=elsewhere, **hub)


@contextmanager
def site_in(tmp_path: Path, elsewhere: Elsewhere | None = None, **hub: Any) -> Iterator[Site]:
    with (
        JobStore.open(tmp_path / "jobs.db") as store,
        hub_in(tmp_path, store, elsewhere, **hub) as running,
    ):
        yield Site(tmp_path, running, store)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with site_in(tmp_path) as site:
        yield site


@pytest.fixture
def running(site: Site) -> Iterator[Site]:
    with site.running():
        yield site


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


def test_an_agent_needs_no_database_and_no_key(site: Site) -> None:
    start = (
        "import sys; sys.modules.update(sqlalchemy=None, cryptography=None); "
        "from jobs.agent import main; sys.exit(main())"
    )
    agent = (sys.executable, "-c", start)
    site.launcher = Launcher(site.launcher.settings.model_copy(update={"agent": agent}))
    sealed = seal({"SECRET": "s3cret"}, SECRET_KEY)
    spec = JobSpec(command=("sh", "-c", "echo $SECRET"), launcher="shell", sealed_env=sealed)
    with site.running():
        ended = site.ended(site.store.submit(spec))
        assert ended.state == "COMPLETED", (ended.outcome, (site.engine / "errors").read_text())
        assert site.log(ended).read_text() == "s3cret\n"


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
    ended = running.ended(job)
    assert ended.state == "ERROR"
    assert ended.outcome is not None and "The engine stopped the job" in str(ended.outcome.reason)


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
    site.store.hand_back(job.id, "me")
    assert site.call(job, "start", ticket, handle="a 1 b").status_code == 409
    for call in ("beat", "finish"):
        assert site.call(job, call, token).status_code == 409


def test_a_runner_that_is_killed_before_the_agent_begins_has_submitted_it(site: Site) -> None:
    go, submitted = site.engine / "go", site.engine / "submitted"
    shell, option, start, *rest = site.launcher.settings.submit
    agent = start.removesuffix(echo := " & echo $$! > $$0")
    late = f"echo >>{submitted}; (until [ -e {go} ]; do sleep 0.02; done; {agent}){echo}"
    words = {"submit": (shell, option, late, *rest)}
    site.launcher = Launcher(site.launcher.settings.model_copy(update=words))
    job = site.submit("leave_children")
    spawn = multiprocessing.get_context("spawn")
    runner = spawn.Process(target=run_runner, args=site.of_runner)
    runner.start()
    try:
        until(submitted.exists, 120)
    finally:
        runner.kill()
        runner.join()
    before = site.store.get(job.id).lease_until or 0
    with site.running():
        until(lambda: (site.store.get(job.id).lease_until or 0) > before)
        go.touch()
        ended = site.ended(job)
    assert (ended.state, ended.attempt) == ("COMPLETED", 1)
    assert len(pids_in(site.log(job))) == 1 and submitted.read_text() == "\n"


@pytest.mark.parametrize(("last", "call"), [("true", "finish"), ("echo ended", "beat")])
def test_while_the_hub_is_away_nothing_is_lost(tmp_path: Path, last: str, call: str) -> None:
    port, go = free_port(), tmp_path / "go"
    script = f"echo begun; until [ -e {go} ]; do sleep 0.02; done; {last}; exit 3"
    spec = JobSpec(command=("sh", "-c", script), launcher="shell")
    with JobStore.open(tmp_path / "jobs.db") as store, ExitStack() as runner:
        with hub_in(tmp_path, store, port=port) as hub:
            site = Site(tmp_path, hub, store)
            runner.enter_context(site.running())
            job = store.submit(spec)
            until(lambda: site.log(job).exists() and "begun" in site.log(job).read_text())

        def said(pattern: str) -> bool:
            return re.search(pattern, (site.engine / "errors").read_text()) is not None

        until(lambda: said("/beat: .* Trying again"))
        go.touch()
        until(lambda: said(f"/{call}: .*; trying again"))
        assert not store.get(job.id).has_ended
        with hub_in(tmp_path, store, port=port):
            ended = site.ended(job)
            runner.close()
    assert (ended.attempt, ended.outcome and ended.outcome.exit_code) == (1, 3)
    assert site.log(job).read_text().split() == ["begun", *last.split()[1:]]


def of_stack(home: Path, pipeline: str, server_url: str = "http://127.0.0.1:9") -> Elsewhere:
    jobs = SETTINGS.model_copy(update={"retry_seconds": 0.01})
    port = httpx.URL(server_url).port
    pipelines = (PipelineSettings(name=pipeline, dataset=DATASET, port=port),)
    tokens = Tokens(hub=TOKEN, admin=ADMIN_TOKEN, webhook="", key=SECRET_KEY.decode())
    settings = Settings.model_construct(jobs=jobs, pipelines=pipelines)
    return jobs_elsewhere(settings, Home(home), tokens)


def test_a_release_whose_swap_was_deferred_is_served_after_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient = "pipeline.runner.elsewhere.promote"
    monkeypatch.setattr(patient, partial(promote, patience_seconds=0.0))
    notes, made = tmp_path / "releases/notes", tmp_path / "made/notes"
    set_current(notes, first := echo_release(notes, 1).id)
    second = made / echo_release(made, 2, parent=first).id
    engine = EchoEngine(holds_two=False, step_seconds=0.05)
    with ExitStack() as stack:
        url = stack.enter_context(running_server(echo_app(notes, engine, drain_seconds=0.1)))
        elsewhere = of_stack(tmp_path, "notes", url)
        site = stack.enter_context(site_in(tmp_path, elsewhere, pipeline_dirs={"notes": notes}))

        def attempt(result: str) -> tuple[str | None, Job]:
            """The release from which an attempt of this result goes on, and the job after it."""
            job = until(lambda: site.store.claim("me", 60))
            started = site.call(job, "start", start_ticket(job, SECRET_KEY), handle="a").json()
            if result == "published":
                uploaded(site.hub, second, f"attempts/{job.id}-{job.attempt}")
            done = site.call(job, "finish", started["token"], outcome={"result": result})
            assert done.status_code == 200, done.text
            return started["variables"].get(CHOSEN), site.store.get(job.id)

        site.submit(pipeline="notes")
        request = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=request) as answer:
            lines = answer.iter_lines()
            next(lines)
            engine.hang["step"] = asyncio.Event()
            chosen, job = attempt("published")
        engine.hang.clear()
        assert (chosen, job.state) == (first, "RUNNING"), job.outcome
        assert job.last_failure is not None and "deferred the swap" in str(job.last_failure.reason)
        chosen, job = attempt("unchanged")
        assert chosen is not None and chosen[-8:] == second.name[-8:]
        assert job.outcome is not None and job.outcome.result == "promoted", job.outcome
        assert job.outcome.release == chosen
        assert httpx.get(f"{url}/health").json()["release"] == chosen
        site.submit(pipeline="notes")
        chosen, job = attempt("unchanged")
        assert job.outcome is not None and job.outcome.result == "unchanged", job.outcome
        assert job.outcome.release is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_preempted_training_goes_on_elsewhere(tmp_path: Path) -> None:
    store, anchors = tmp_path / "store", few_anchors(tmp_path)
    train = {"max_tokens": 400, "tokens_per_step": 128, "checkpoint_seconds": 1e-9}
    train |= {"anchors": anchors, "lora_rank": 0, "checkpoint_url": f"file://{store}"}
    gate = {"min_learned": 0.0, "max_base_drift": 1.0}
    pipeline = Pipeline(tmp_path, base_model=tiny_base(tmp_path), train=train, gate=gate)
    dirs = {"facts": pipeline.dir}
    elsewhere = of_stack(tmp_path, "facts")
    with site_in(tmp_path, elsewhere, pipeline_dirs=dirs) as site, site.running():
        site.hub.api.create_repo(DATASET, repo_type="dataset")
        rows = jsonl(facts()).encode()
        pushed = {"path_or_fileobj": rows, "path_in_repo": "a.jsonl", "repo_id": DATASET}
        commit = site.hub.api.upload_file(**pushed, repo_type="dataset")
        spec = pipeline.spec(commit.oid).model_copy(update={"launcher": "shell"})
        job = site.store.submit(spec)
        until(lambda: list(store.rglob("checkpoint.json")), 240)
        handle = site.store.get(job.id).handle
        assert handle is not None
        os.kill(int(handle.split()[1]), signal.SIGKILL)
        ended = site.ended(job, 240)
    log = site.log(job).read_text()
    assert ended.outcome is not None and ended.outcome.result == "published", log
    assert ended.attempt == 2
    assert re.search(r"going on from the checkpoint step-0*[1-9]", log), log


@pytest.mark.slow
def test_a_large_log_arrives_from_an_agent_with_less_memory(site: Site) -> None:
    agent = ("prlimit", f"--data={MEMORY_BYTES}", *AGENT)
    site.launcher = Launcher(site.launcher.settings.model_copy(update={"agent": agent}))
    script = f"head -c {LOG_BYTES} /dev/zero | tr '\\0' 'x'"
    with site.running():
        job = site.store.submit(JobSpec(command=("sh", "-c", script), launcher="shell"))
        assert site.ended(job, 240).state == "COMPLETED"
        assert site.log(job).stat().st_size == LOG_BYTES
