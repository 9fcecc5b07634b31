"""Hundreds of clients that stop in the middle, on each service as its command starts it: its memory
stays below a bound, an honest client is served meanwhile, and all of them are ended."""

import contextlib
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hub_fixtures import TOKEN, git_env, run_git, wait_until
from tests.ports import free_ports
from tests.slow_clients import connected, outlive, request

pytestmark = pytest.mark.slow

NUM_OF_EACH_KIND = 120
MAX_GROWTH_BYTES = 200 * 2**20
"""By which the rude clients of one service may make its memory grow. Their bodies alone would take
600 MiB of the receiver, and 960 MiB of the server."""
MAX_SECONDS = 100
"""The longest time-out is 60 s."""

STREAM = (
    b'{"prompt": "Hello", "max_tokens": 120, "ignore_eos": true, "stream": true, "n": 128,'
    b' "logprobs": 5}'
)


@contextlib.contextmanager
def running(service: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    [port] = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "tests.rude_clients_program", service, str(folder), str(port)]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: is_served(url), seconds=60)
            yield url, psutil.Process(process.pid)
        finally:
            process.terminate()
            process.wait()


def is_served(url: str) -> bool:
    with contextlib.suppress(httpx.ConnectError):
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    return False


def half_body(service: str, url: str) -> bytes:
    """As much as the service takes, but for the last byte."""
    if service == "hub":
        proof = {"Authorization": f"Bearer {TOKEN}"}
        num_bytes = 2**20
        return request(url, "POST", "/api/repos/create", num_bytes=num_bytes, **proof) + b" " * (
            num_bytes - 1
        )
    path, num_bytes = {
        "receiver": ("/webhooks/seen", 5 * 2**20),
        "server": ("/v1/completions", 8 * 2**20),
    }[service]
    return request(url, "POST", path, num_bytes=num_bytes) + b" " * (num_bytes - 1)


def large(service: str, url: str, folder: Path) -> bytes:
    if service == "hub":
        proof = {"Authorization": f"Bearer {TOKEN}"}
        made = httpx.post(
            f"{url}/api/repos/create", json={"name": "facts", "type": "dataset"}, headers=proof
        )
        assert made.is_success
        env, work = git_env(url, TOKEN), folder / "work"
        run_git("clone", "-q", f"{url}/datasets/local/facts", str(work), cwd=folder, env=env)
        (work / "big.txt").write_text("x" * (8 * 2**20))
        run_git("add", "-A", cwd=work, env=env)
        run_git("commit", "-qm", "big", cwd=work, env=env)
        run_git("push", "-q", "origin", "HEAD:main", cwd=work, env=env)
        return request(url, "GET", "/datasets/local/facts/resolve/main/big.txt", **proof)
    if service == "receiver":
        return request(url, "GET", "/big")
    return request(url, "POST", "/v1/completions", num_bytes=len(STREAM)) + STREAM


@pytest.mark.parametrize("service", ["hub", "receiver", "server"])
def test_rude_clients_take_little_and_end(service: str, tmp_path: Path) -> None:
    with running(service, tmp_path) as (url, process), contextlib.ExitStack() as stack:
        kinds = {
            "nothing": b"",
            "half headers": b"GET /health HTTP/1.1\r\nX-A: ",
            "half a body": half_body(service, url),
            "an unread answer": large(service, url, tmp_path),
        }
        before = process.memory_info().rss
        largest = before
        clients: dict[str, socket.socket] = {}
        for number in range(NUM_OF_EACH_KIND):
            for kind, sent in kinds.items():
                client = stack.enter_context(connected(url, reads_little=True))
                client.settimeout(5)
                # Refused, ended or no longer read: all are answers.
                with contextlib.suppress(OSError):
                    client.sendall(sent)
                clients[f"{kind} {number}"] = client
            if number % 10 == 0:
                assert is_served(url)
                largest = max(largest, process.memory_info().rss)
        end = time.monotonic() + MAX_SECONDS
        while left := outlive(clients, {}, within_seconds=2):
            assert time.monotonic() < end, left
            assert is_served(url)
            largest = max(largest, process.memory_info().rss)
        assert largest - before < MAX_GROWTH_BYTES
