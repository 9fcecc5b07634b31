"""Hub and receiver together, and SIGKILL for either of them: `WEBHOOK_KILLS` times, 50 in
`make soak-webhooks`."""

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import httpx

from tests.hub_fixtures import commit_file, wait_until
from tests.integration.test_hub_durability import HubProcess, make_worktree
from tests.ports import free_port
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401

NUM_KILLS = int(os.environ.get("WEBHOOK_KILLS", "4"))
WATCHED = [{"type": "dataset", "name": "local/facts"}]


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
            sha = commit_file(hub, worktree, "a.txt", str(number))
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
        last = commit_file(hub, worktree, "a.txt", "last")
        hub.git("push", "-q", "origin", "main", cwd=worktree)
        wait_until(lambda: last in receiver.effects(), seconds=60)
        effects = receiver.effects()
    finally:
        hub.kill()
        receiver.kill()
    assert {*acknowledged, last} <= set(effects)
    assert len(effects) == len(set(effects))
