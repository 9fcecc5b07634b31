"""Hundreds of clients that stop in the middle, on each service as its command starts it: its memory
stays below a bound, an honest client is served meanwhile, and all of them are ended."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.hub_fixtures import TOKEN, git_env, run_git, wait_until
from tests.ports import free_ports
from tests.slow_clients import connected, request

pytestmark = pytest.mark.slow

NUM_OF_EACH_KIND = 120
NUM_STREAMS = 2
"""Of 128 sequences each: more would take all the time of the processor."""
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


def num_connections(process: psutil.Process) -> int:
    """What a client left unread may stay with the system, which gives it up later."""
    found = process.net_connections("tcp")
    return sum(one.status != psutil.CONN_LISTEN for one in found)


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
        # Its answers are small, but nobody keeps a client from asking again without reading.
        return 100 * request(url, "GET", "/openapi.json")
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
        seen = [process.memory_info().rss]

        def is_well() -> bool:
            seen.append(process.memory_info().rss)
            return is_served(url)

        def have_ended() -> bool:
            assert is_well()
            return num_connections(process) == 0

        for number in range(NUM_OF_EACH_KIND):
            for kind, sent in kinds.items():
                if (service, kind) == ("server", "an unread answer") and number >= NUM_STREAMS:
                    continue
                client = stack.enter_context(connected(url, reads_little=True))
                client.settimeout(5)
                # Refused, ended or no longer read: all are answers.
                with contextlib.suppress(OSError):
                    client.sendall(sent)
            if number % 10 == 0:
                assert is_well()
        wait_until(have_ended, seconds=MAX_SECONDS, every_seconds=1)
        assert max(seen) - seen[0] < MAX_GROWTH_BYTES
