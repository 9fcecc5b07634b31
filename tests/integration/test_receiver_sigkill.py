"""A receiver that is killed with `SIGKILL` loses nothing that it has acknowledged."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from tests.jobs_fixtures import until
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import dataset_update

ROOT = Path(__file__).resolve().parents[2]


SCRIPT = """
import os, sys, time
from pathlib import Path
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings

folder = Path(sys.argv[1])
server = WebhooksServer(settings=ReceiverSettings(port=0, deliveries_path=folder / "receiver.db"))

@server.add_webhook(durable=True)
def work(payload: WebhookPayload, request):
    time.sleep(0.02)
    (folder / "effects" / request.state.delivery_id).touch()

server.launch()
"""


@contextlib.contextmanager
def started(folder: Path) -> Any:
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(folder)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        try:
            url = next(
                line.split()[1].rstrip("/") for line in process.stdout if line.startswith("Open ")
            )
            yield url, process
        finally:
            process.kill()


def test_nothing_that_was_acknowledged_is_lost_to_sigkill(tmp_path: Path) -> None:
    """`RECEIVER_KILLS` says how often."""
    (tmp_path / "effects").mkdir()
    acknowledged: list[str] = []
    for round in range(int(os.environ.get("RECEIVER_KILLS", "2"))):
        with started(tmp_path) as (url, process):
            # In the midst of what follows the tenth acknowledgement, elsewhere in each round.
            killer = threading.Timer(0.007 * round, process.send_signal, [signal.SIGKILL])
            with contextlib.suppress(httpx.TransportError), httpx.Client() as client:
                for number in range(10_000):
                    headers = {"Webhook-Id": f"{round}-{number}"}
                    answer = client.post(
                        f"{url}/webhooks/work", json=dataset_update(), headers=headers
                    )
                    assert answer.status_code == 202
                    acknowledged.append(headers["Webhook-Id"])
                    if number == 10:
                        killer.start()
            killer.join()
    with started(tmp_path):
        until(lambda: set(acknowledged) <= {path.name for path in (tmp_path / "effects").iterdir()})
