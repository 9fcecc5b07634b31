"""Two waits of a person who uses the hub: for the job of a `push_to_hub`, and for a hub that
starts."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx

from jobs.store import JobStore
from receiver.retrain import RetrainRule, retrain_handler
from receiver.server import WebhooksServer
from receiver.settings import ReceiverSettings
from tests.hub_fixtures import RunningHub, wait_until
from tests.ports import free_port
from tests.stack_fixtures import end_with_this_process

DATASET, SECRET = "local/rows", "s3cret"
LIMIT_SECONDS = 120.0

PUSH = """
import sys, time
from datasets import Dataset
numbers = range(int(sys.argv[2]))
rows = Dataset.from_dict({"text": [f"Shelf {n} holds box {n * 7 % 1000}." for n in numbers]})
started = time.perf_counter()
made = rows.push_to_hub(sys.argv[1])
print(made.oid, time.perf_counter() - started, time.time(), flush=True)
"""


def push_to_hub(hub: RunningHub, folder: Path, num_rows: int) -> tuple[float, float]:
    """The seconds of `push_to_hub`, and those from its return until the job is in the store.

    Negative if the job is there before the call returns. Receiver and store are those of a stack.
    """
    settings = ReceiverSettings(port=0)
    server = WebhooksServer(webhook_secret=SECRET, settings=settings)
    with JobStore.open(folder / "jobs.db") as store:
        rules = [RetrainRule(pipeline="rows", dataset=DATASET)]
        server.add_webhook("/retrain", knows_repeats=True)(retrain_handler(store, rules))
        url = server.launch(prevent_thread_lock=True)
        try:
            hub.api.create_webhook(
                url=f"{url}/webhooks/retrain",
                watched=[{"type": "dataset", "name": DATASET}],
                secret=SECRET,
            )
            sha, seconds, returned = _pushed(hub, folder, num_rows)
            job, *_ = wait_until(lambda: store.of_commit(sha), seconds=LIMIT_SECONDS)
        finally:
            server.close()
    return seconds, job.created_at - returned


def _pushed(hub: RunningHub, folder: Path, num_rows: int) -> tuple[str, float, float]:
    env = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(folder / "hf"),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PUSH, DATASET, str(num_rows)],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"push_to_hub failed:\n{done.stderr[-4000:]}")
    sha, seconds, returned = done.stdout.splitlines()[-1].split()
    return sha, float(seconds), float(returned)


def start_of_process(home: Path) -> float:
    """The seconds from the start of `pipeline hub` until it answers."""
    port = free_port()
    env = {**os.environ, "PIPELINE_HOME": str(home), "PIPELINE_SETTINGS": str(home / "none.toml")}
    command = [sys.executable, "-m", "pipeline", "hub", "--port", str(port)]
    started = time.perf_counter()
    with (home / "hub.log").open("ab") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, preexec_fn=end_with_this_process
        )

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"no hub starts:\n{(home / 'hub.log').read_text()[-4000:]}")
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health", verify=False).is_success
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, seconds=LIMIT_SECONDS, every_seconds=0.005)
            return time.perf_counter() - started
        finally:
            process.terminate()
            process.wait()
