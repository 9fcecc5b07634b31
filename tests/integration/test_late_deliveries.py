"""A real hub, a real receiver and a real runner: which commits are trained on, and when."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from typer.testing import CliRunner

from jobs.job import Job
from jobs.runner import Runner
from jobs.store import JobStore
from pipeline.cli.main import app
from pipeline.paths import Home
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import head_finder
from pipeline.settings import load_settings
from pipeline.tokens import load_tokens
from receiver import listen
from receiver.retrain import retrain_handler
from receiver.webhooks_server import WebhooksServer
from serving.http.server import Server
from tests.hub_fixtures import TOKEN, RunningHub, commit_file, run_git, running_hub, wait_until
from tests.job_runner_fixtures import ENVIRONMENT, SETTINGS
from tests.receiver_fixtures import rule

TRAINER = """
import json, os, pathlib
payload = json.loads(os.environ["WEBHOOK_PAYLOAD"])
[update] = payload["updatedRefs"]
assert payload["repo"]["headSha"] == update["newSha"]
pathlib.Path("outcome.json").write_text(
    json.dumps({"result": "promoted", "dataset_revision": update["newSha"]})
)
"""


class Failing:
    """Answers the first delivery of some commits with a 500."""

    def __init__(self, receiver: ASGIApp) -> None:
        self.receiver = receiver
        self.refused: set[str] = set()
        self.holds: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self.holds:
            body = (await Request(scope, receive).body()).decode()
            if held := {sha for sha in self.holds if f'"newSha":"{sha}"' in body.replace(" ", "")}:
                self.refused |= held
                await Response("busy", status_code=500)(scope, receive, send)
                return

            async def again() -> dict[str, object]:
                return {"type": "http.request", "body": body.encode(), "more_body": False}

            receive = again
        await self.receiver(scope, receive, send)


class Loop:
    def __init__(self, hub: RunningHub, store: JobStore, failing: Failing, clone: Path) -> None:
        self.hub, self.store, self.failing, self.clone = hub, store, failing, clone

    def commit(self, name: str) -> str:
        return commit_file(self.hub, self.clone, f"{name}.jsonl", '{"text": "x"}\n')

    def push(self) -> None:
        self.hub.git("push", "-q", "--force", "origin", "HEAD:main", cwd=self.clone)

    def ended(self, number: int) -> Job:
        job: Job = wait_until(
            lambda: (
                found
                if len(jobs := self.store.list()) >= number
                and (found := jobs[-number]).ended_at is not None
                else None
            )
        )
        return job


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    home = Home(tmp_path / "home")
    monkeypatch.setenv("PIPELINE_HOME", str(home.root))
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    told = load_tokens(home.tokens_file).model_dump() | {"hub": TOKEN}
    home.tokens_file.write_text(json.dumps(told))
    tokens = load_tokens(home.tokens_file)
    follows = rule(
        "facts",
        "local/facts",
        command=(sys.executable, "-c", TRAINER),
    )
    schedule = {"delivery_schedule_seconds": (0, *[0.1] * 300)}
    with (
        running_hub(tmp_path / "hub", **schedule) as hub,
        open_job_store(load_settings(), home) as store,
    ):
        monkeypatch.setenv("PIPELINE_HUB__PORT", str(hub.settings.port))
        server = WebhooksServer(webhook_secret="s3cret")
        server.add_webhook("/retrain", knows_repeats=True)(retrain_handler(store, [follows]))
        failing = Failing(server.app)
        listening = listen.bind("127.0.0.1", 0)
        url = listen.url_of(listening, "127.0.0.1")
        http = Server(failing, shutdown_seconds=10)
        serving = listen.serve_in_thread(http, listening)
        runner = Runner(
            store,
            home.jobs_dir,
            SETTINGS,
            ENVIRONMENT,
            find_head=head_finder(hub.url, tokens),
        )
        stop = threading.Event()
        running = threading.Thread(target=runner.run, args=(stop,))
        running.start()
        try:
            git_url = hub.create_dataset("local/facts")
            run_git("clone", "-q", git_url, "clone", cwd=tmp_path, env=hub.git_env)
            hub.api.create_webhook(
                url=f"{url}/webhooks/retrain",
                secret="s3cret",
                watched=[{"type": "dataset", "name": "local/facts"}],
            )
            yield Loop(hub, store, failing, tmp_path / "clone")
        finally:
            stop.set()
            running.join()
            http.should_exit = True
            serving.join()


def trained(job: Job) -> str | None:
    assert job.outcome is not None
    return job.outcome.dataset_revision


def test_a_late_delivery_does_not_bring_an_older_commit_back(loop: Loop) -> None:
    a = loop.commit("a")
    loop.failing.holds.add(a)
    loop.push()
    wait_until(lambda: a in loop.failing.refused)
    b = loop.commit("b")
    loop.push()
    loop.failing.holds.clear()
    first = loop.ended(1)
    assert trained(first) == b and first.outcome is not None
    assert first.outcome.result == "promoted"
    wait_until(lambda: len(loop.store.of_commit(a)) == 1)
    late = loop.store.of_commit(a)[0]
    if late.id != first.id:
        late = loop.ended(2)
        assert late.outcome is not None and late.outcome.result == "unchanged"
        assert late.outcome.stage == "claim"
    all_jobs = [loop.ended(number) for number in range(1, len(loop.store.list()) + 1)]
    assert {trained(job) for job in all_jobs} == {b}


def test_a_commit_in_the_middle_of_a_push_is_waited_for(loop: Loop) -> None:
    """The hub answers whether the head that was trained contains it."""
    middle = loop.commit("a")
    loop.commit("b")
    loop.push()
    job = loop.ended(1)
    waited = CliRunner().invoke(app, ["jobs", "wait", "--commit", middle])
    assert waited.exit_code == 0, waited.output
    assert waited.stdout.splitlines()[-1].startswith(job.id)
    later = loop.commit("c")
    timed_out = CliRunner().invoke(app, ["jobs", "wait", "--commit", later, "--timeout", "0.5"])
    assert timed_out.exit_code == 124, "it is not pushed yet"
