"""The receiver under load: events accepted per second, and how long each waits for its answer.

Run from the repository's root: `python -m tests.bench.bench_receiver [--seconds 10]`. Beside our
two ways to keep an event (the retrain handler's job store, a durable handler's log) stands a peer
that keeps nothing: the route that `huggingface_hub`'s WebhooksServer makes, on the same FastAPI.
That class needs gradio; an interpreter that has it (`--peer-python`) measures it as it is.
"""

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.receiver_payloads import dataset_update, ref_update

ROOT = Path(__file__).parents[2]
CLIENTS = 16
SECRET = "s3cret"

OURS = """
import sys
from pathlib import Path
from jobs.store import JobStore
from receiver.retrain import RetrainRule, retrain_handler
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings

folder = Path(sys.argv[1])
settings = ReceiverSettings(port=0, deliveries_path=folder / "receiver.db")
server = WebhooksServer(webhook_secret="s3cret", settings=settings)
rules = [RetrainRule(pipeline="answers", dataset="acme/answers")]
server.add_webhook("/retrain")(retrain_handler(JobStore.open(folder / "jobs.db"), rules))

@server.add_webhook("/durable", durable=True)
async def durable(payload: WebhookPayload) -> None: ...

@server.add_webhook("/nothing")
async def nothing(payload: WebhookPayload) -> None: ...

server.launch()
"""

PEER = """
import socket, sys
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from huggingface_hub._webhooks_payload import WebhookPayload

app = FastAPI()

@app.post("/webhooks/peer")
async def peer(request: Request, payload: WebhookPayload):
    if request.headers.get("x-webhook-secret") != "s3cret":
        return JSONResponse({"error": "Invalid webhook secret."}, status_code=403)

listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
listener.bind(("127.0.0.1", 0))
print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""

HUGGINGFACE = """
import sys
from huggingface_hub import WebhookPayload, WebhooksServer

server = WebhooksServer(webhook_secret="s3cret")

@server.add_webhook("/peer")
async def peer(payload: WebhookPayload):
    return None

server.launch(share=False, server_port=int(sys.argv[2]), quiet=True)
"""


@contextmanager
def running(code: str, python: str, port: int = 0) -> Iterator[str]:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [python, "-W", "ignore", "-c", code, folder, str(port)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                break
        else:
            raise RuntimeError("the server said no address")
        url = found[0]
        while True:
            try:
                httpx.get(f"{url}/openapi.json", trust_env=False)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield url
        process.terminate()


async def load(url: str, seconds: float, per_second: float | None) -> tuple[float, list[float]]:
    """Accepted per second, and the seconds that each answer took from when it was due, sorted.

    Without `per_second`, each client posts as soon as it was answered.
    """
    taken: list[float] = []
    number = 0
    began = time.perf_counter()

    async def client(session: httpx.AsyncClient) -> None:
        nonlocal number
        while True:
            mine, number = number, number + 1
            due = began + mine / per_second if per_second else time.perf_counter()
            if due - began > seconds:
                return
            await asyncio.sleep(max(due - time.perf_counter(), 0))
            answer = await session.post(
                url,
                json=dataset_update(ref_update(new=f"{mine:040x}")),
                headers={"X-Webhook-Secret": SECRET, "Webhook-Id": f"{per_second}-{mine}"},
            )
            assert answer.is_success, answer.text
            taken.append(time.perf_counter() - due)

    async with httpx.AsyncClient(timeout=60, trust_env=False, verify=False) as session:
        await asyncio.gather(*(client(session) for _ in range(CLIENTS)))
    return len(taken) / (time.perf_counter() - began), sorted(taken)


def measure(name: str, url: str, seconds: float) -> None:
    asyncio.run(load(url, 1, None))
    accepted, _ = asyncio.run(load(url, seconds, None))
    _, taken = asyncio.run(load(url, seconds, 100))
    p50, p99 = (taken[int(len(taken) * part)] * 1e3 for part in (0.5, 0.99))
    print(f"{name:34} {accepted:10.0f} {p50:12.1f} {p99:9.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10, help="of each of the two loads")
    parser.add_argument("--peer-python", help="an interpreter with huggingface_hub and gradio")
    options = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {CLIENTS} clients")
    print(f"{'':34} {'accepted/s':>10} {'p50 at 100/s':>12} {'p99, ms':>9}")
    with running(OURS, sys.executable) as url:
        measure("ours, a job of each event", f"{url}/webhooks/retrain", options.seconds)
        measure("ours, durable", f"{url}/webhooks/durable", options.seconds)
        measure("ours, storing nothing", f"{url}/webhooks/nothing", options.seconds)
    with running(PEER, sys.executable) as url:
        measure("the same route, storing nothing", f"{url}/webhooks/peer", options.seconds)
    if options.peer_python:
        with running(HUGGINGFACE, options.peer_python, 7861) as url:
            measure("huggingface_hub's WebhooksServer", f"{url}/webhooks/peer", options.seconds)
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
