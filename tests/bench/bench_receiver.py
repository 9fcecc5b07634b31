"""The receiver under load, beside `huggingface_hub`'s own WebhooksServer, which stores nothing.

All servers are up at once, in processes of their own, and are loaded in turns by the same client:
16 connections as quickly as they are answered, then 100 events per second. Ours has a handler that
stores nothing either, and the retrain handler, which keeps each event in the job store.
"""

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

from tests.bench.http_load import Load, load, post_request
from tests.bench.result import Result, at_least, at_most, reported, run_program
from tests.bench.timing import in_turns, percentile
from tests.ports import free_ports
from tests.receiver_payloads import dataset_update, ref_update

ROOT = Path(__file__).parents[2]
CLIENTS = 16
SECRET = "s3cret"
PACE = 100.0
PEER_RATIO, EQUAL_RATIO, P99_MS = 0.7, 1.0, 50.0


@dataclass(frozen=True, kw_only=True)
class Size:
    rounds: int
    seconds: float
    """Of each load."""


FULL, SMALL = Size(rounds=15, seconds=2.0), Size(rounds=1, seconds=0.5)

OURS = """
import sys
from pathlib import Path
from jobs.store import JobStore
from jobs.spec import JobSpec
from receiver.retrain import retrain_handler
from receiver.retrain import RetrainRule
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings

folder = Path(sys.argv[1])
settings = ReceiverSettings(port=int(sys.argv[2]))
server = WebhooksServer(webhook_secret="s3cret", settings=settings)
spec = JobSpec(command=("train",), pipeline="answers", debounce_seconds=1.0)
rules = [RetrainRule(spec=spec, dataset="acme/answers")]
retrain = retrain_handler(JobStore.open(folder / "jobs.db"), rules)
server.add_webhook("/retrain", knows_repeats=True)(retrain)

@server.add_webhook("/nothing")
async def nothing(payload: WebhookPayload) -> None: ...

server.launch()
"""

PEER = """
import sys
from huggingface_hub import WebhookPayload, WebhooksServer

server = WebhooksServer(webhook_secret="s3cret")

@server.add_webhook("/peer")
async def peer(payload: WebhookPayload):
    return None

server.launch(share=False, server_port=int(sys.argv[2]), quiet=True)
"""

LABELS = {
    "retrain": "ours, a job of each event",
    "nothing": "ours, storing nothing",
    "peer": "huggingface_hub's WebhooksServer, storing nothing",
}


def measure(size: Size) -> Result:
    """Events accepted per second by 16 clients, and the p99 at 100 per second."""
    with ExitStack() as stack:
        ours, peer = (stack.enter_context(_running(code)) for code in (OURS, PEER))
        urls = {name: f"{ours.url}/webhooks/{name}" for name in LABELS if name != "peer"}
        urls["peer"] = f"{peer.url}/webhooks/peer"
        posts = _Posts((ours, peer))
        for url in urls.values():
            posts.load(url, min(1.0, size.seconds), None)
        fast, paced = (_rounds(posts, urls, size, pace) for pace in (None, PACE))
    rates = {name: statistics.median(each.per_second for each in fast[name]) for name in urls}
    p99 = {name: statistics.median(_p99_ms(each) for each in paced[name]) for name in urls}
    # Round by round: the machine's speed changes between them.
    rounds = zip(fast["nothing"], fast["peer"], strict=True)
    ratio = statistics.median(ours.per_second / peer.per_second for ours, peer in rounds)
    return Result(
        figures=(
            at_least("storing nothing / huggingface_hub's, 16 clients", ratio, PEER_RATIO, "x"),
            at_least("as many per second as huggingface_hub's", ratio, EQUAL_RATIO, "x"),
            at_most("a job of each event: p99 at 100 events/s", p99["retrain"], P99_MS, "ms"),
            *(reported(LABELS[name], rates[name], "events/s") for name in urls),
            reported("huggingface_hub's: p99 at 100 events/s", p99["peer"], "ms"),
        ),
        bounded_by="one core of Python per server; a stored event adds a commit with fsync, which "
        "events that arrive together share",
        detail={
            name: {
                "per_second": [each.per_second for each in fast[name]],
                "p99_ms_at_100_per_second": [_p99_ms(each) for each in paced[name]],
                "p99_ms_at_full_load": [_p99_ms(each) for each in fast[name]],
            }
            for name in urls
        },
    )


def _rounds(
    posts: "_Posts", urls: Mapping[str, str], size: Size, pace: float | None
) -> dict[str, list[Load]]:
    def once(url: str) -> Callable[[], Load]:
        return lambda: posts.load(url, size.seconds, pace)

    return in_turns(size.rounds, {name: once(url) for name, url in urls.items()})


def _p99_ms(found: Load) -> float:
    return 1e3 * percentile(found.seconds, 0.99)


class _Posts:
    """Each event is another one, through all loads: a delivery that was seen costs less."""

    def __init__(self, servers: Sequence["_Server"]) -> None:
        self._servers = servers
        self._first = 0

    def load(self, url: str, seconds: float, per_second: float | None) -> Load:
        for server in self._servers:
            server.wait_until_idle()
        first = self._first
        found = asyncio.run(
            load(
                url,
                lambda number: _event(url, first + number),
                clients=CLIENTS,
                seconds=seconds,
                per_second=per_second,
            )
        )
        self._first += len(found.seconds) + CLIENTS
        return found


def _event(url: str, number: int) -> bytes:
    body = json.dumps(dataset_update(ref_update(new=f"{number:040x}"))).encode()
    return post_request(url, body, {"X-Webhook-Secret": SECRET, "Webhook-Id": f"delivery-{number}"})


@dataclass(frozen=True, kw_only=True)
class _Server:
    url: str
    process: psutil.Process

    def wait_until_idle(self) -> None:
        """It has handled all that it stored. Raises `TimeoutError` after two minutes."""
        deadline = time.monotonic() + 120
        while self._cpu_seconds(0.2) > 0.01:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.url} is still at work two minutes after its last event")

    def _cpu_seconds(self, within_seconds: float) -> float:
        before = self.process.cpu_times()
        time.sleep(within_seconds)
        after = self.process.cpu_times()
        return after.user + after.system - before.user - before.system


@contextmanager
def _running(code: str) -> Iterator[_Server]:
    """The server of a script, in a process and a folder of its own."""
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        "GRADIO_ANALYTICS_ENABLED": "False",
        "HF_HUB_OFFLINE": "1",
    }
    (port,) = free_ports(1)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.txt"
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", code, folder, str(port)],
                stdout=stream,
                stderr=stream,
                cwd=folder,
                env=env,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _answers(url):
                if process.poll() is not None:
                    raise RuntimeError(f"the server ended: {log.read_text()[-2000:]}")
                time.sleep(0.1)
            yield _Server(url=url, process=psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(30)


def _answers(url: str) -> bool:
    try:
        httpx.get(f"{url}/openapi.json", trust_env=False)
    except httpx.TransportError:
        return False
    return True


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
