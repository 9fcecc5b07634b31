"""Hub and receiver together: a burst of pushes while a job runs, and SIGKILL for either of them.

`BURST_PUSHES` and `WEBHOOK_KILLS` say how much of it; `make soak-webhooks` takes 1,000 and 50.
"""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jobs.job import Job
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.store import JobStore
from pipeline.runner.submit import head_finder
from pipeline.tokens import Tokens
from receiver.retrain import retrain_handler
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from tests.hub_fixtures import RunningHub, commit_file, running_hub, wait_until
from tests.integration.test_hub_durability import HubProcess, commit, make_worktree
from tests.ports import free_port
from tests.receiver_fixtures import no_secret_in_the_environment, rule  # noqa: F401

NUM_PUSHES = int(os.environ.get("BURST_PUSHES", "20"))
NUM_KILLS = int(os.environ.get("WEBHOOK_KILLS", "4"))
WATCHED = [{"type": "dataset", "name": "local/facts"}]

WAIT = """
import os, pathlib, time
may_end = pathlib.Path(os.environ["MAY_END"])
while not may_end.exists():
    time.sleep(0.05)
pathlib.Path(os.environ["JOB_DIR"], "outcome.json").write_text('{"result": "unchanged"}')
"""


@pytest.mark.slow
def test_a_burst_of_pushes_while_a_job_runs_is_one_running_and_one_pending(tmp_path: Path) -> None:
    may_end = tmp_path / "may-end"
    follows = rule(
        "facts",
        "local/facts",
        command=(sys.executable, "-c", WAIT),
        env={"MAY_END": str(may_end)},
    )
    server = WebhooksServer(webhook_secret="s3cret", settings=ReceiverSettings(port=0))
    with (
        JobStore.open(tmp_path / "jobs.sqlite") as store,
        running_hub(tmp_path / "hub", delivery_schedule_seconds=(0,) * 9) as hub,
        running(store, tmp_path / "jobs", hub),
    ):
        server.add_webhook("/retrain", knows_repeats=True)(retrain_handler(store, [follows]))
        url = server.launch(prevent_thread_lock=True)
        try:
            created = hub.api.create_webhook(
                url=f"{url}/webhooks/retrain", watched=WATCHED, secret="s3cret"
            )
            worktree = tmp_path / "facts"
            hub.git("init", "-q", str(worktree), cwd=tmp_path)
            remote = hub.create_dataset("local/facts")
            hub.git("remote", "add", "origin", remote, cwd=worktree)
            shas = []
            for number in range(NUM_PUSHES):
                shas.append(commit_file(hub, worktree, "a.txt", str(number)))
                hub.git("push", "-q", "origin", "main", cwd=worktree)
                if number == 0:
                    wait_until(lambda: [job.state for job in store.list()] == ["RUNNING"])
                unfinished = [job for job in store.list() if not job.has_ended]
                assert len(unfinished) <= 2
            pushes = {
                one["id"]: one["new_sha"] for one in hub.deliveries(created.id) if one["new_sha"]
            }
            wait_until(
                lambda: {one["status"] for one in hub.deliveries(created.id)} == {"delivered"}
            )
            first, second = sorted(store.list(), key=lambda job: job.id)
        finally:
            server.close()
            may_end.touch()
        assert (first.state, second.state) == ("RUNNING", "SCHEDULING")
        seen = [*told(first), *told(second)]
        assert len(seen) == len(set(seen)) == NUM_PUSHES, "none lost, none twice"
        assert set(pushes) <= set(seen)
        wait_until(lambda: all(job.has_ended for job in store.list()))
        ranges = [store.get(job.id).spec.revisions for job in (first, second)]
        heads = [(range.old_sha, range.new_sha) for range in ranges if range is not None]
        assert heads == [(None, shas[0]), (shas[0], shas[-1])]


def told(job: Job) -> tuple[str, ...]:
    assert job.spec.revisions is not None
    return job.spec.revisions.delivery_ids


@contextlib.contextmanager
def running(store: JobStore, jobs_dir: Path, hub: RunningHub) -> Iterator[None]:
    stop = threading.Event()
    tokens = Tokens(hub=hub.token, admin="a", webhook="w", key="k")
    runner = Runner(
        store,
        jobs_dir,
        JobsSettings(preload=()),
        {"PATH": os.environ["PATH"]},
        find_head=head_finder(hub.url, tokens),
    )
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(30)


RECEIVER = """
import sqlite3, sys
from pathlib import Path
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings

folder, port = Path(sys.argv[1]), int(sys.argv[2])
settings = ReceiverSettings(port=port)
server = WebhooksServer(webhook_secret="s3cret", settings=settings)
effects = sqlite3.connect(folder / "effects.db", check_same_thread=False, timeout=30)
effects.execute("CREATE TABLE IF NOT EXISTS effects (delivery TEXT PRIMARY KEY, sha TEXT)")

@server.add_webhook
async def work(payload: WebhookPayload, request):
    # The hub delivers at least once; the delivery's id makes its effect happen once.
    for update in payload.updatedRefs or ():
        with effects:
            row = (request.state.delivery_id, update.newSha)
            effects.execute("INSERT OR IGNORE INTO effects VALUES (?, ?)", row)

server.launch()
"""


class ReceiverProcess:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}/webhooks/work"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, str(self.folder), str(self.port)],
            stdout=subprocess.DEVNULL,
        )
        wait_until(self._answers, every_seconds=0.05)

    def _answers(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{self.port}/health").status_code == 200
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def effects(self) -> list[str]:
        with contextlib.closing(sqlite3.connect(self.folder / "effects.db", timeout=30)) as found:
            return [sha for (sha,) in found.execute("SELECT sha FROM effects")]


def test_each_push_has_its_effect_once_whoever_is_killed(tmp_path: Path) -> None:
    hub, receiver = HubProcess(tmp_path / "hub"), ReceiverProcess(tmp_path)
    hub.start()
    receiver.start()
    moments = random.Random(0)
    try:
        worktree = make_worktree(hub, tmp_path / "facts")
        hub.api.create_webhook(url=receiver.url, watched=WATCHED, secret="s3cret")
        acknowledged = []
        for number in range(NUM_KILLS):
            sha = commit(hub, worktree, str(number))
            push = subprocess.Popen(
                ["git", "push", "-q", "origin", "main"],
                cwd=worktree,
                env=hub.env,
                stderr=subprocess.DEVNULL,
            )
            time.sleep(moments.uniform(0, 0.2))  # the moment is the test
            victims = moments.choice([(hub,), (receiver,), (hub, receiver)])
            for victim in victims:
                victim.kill()
            if push.wait() == 0:
                acknowledged.append(sha)
            for victim in victims:
                victim.start()
        last = commit(hub, worktree, "last")
        hub.git("push", "-q", "origin", "main", cwd=worktree)
        wait_until(lambda: last in receiver.effects(), seconds=60)
        effects = receiver.effects()
    finally:
        hub.kill()
        receiver.kill()
    assert {*acknowledged, last} <= set(effects)
    assert len(effects) == len(set(effects))
