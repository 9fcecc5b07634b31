"""Clients of large files that stop in the middle, a hub that is killed, and many at once."""

import contextlib
import hashlib
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from pipeline.hub.large_files import LargeFiles
from tests.hub_fixtures import RunningHub, running_hub, wait_until
from tests.slow_clients import connected, request

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")

CONTENT = random.Random(17).randbytes(12_000_000)
OID = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp("faults")
    with running_hub(folder / "hub", reconcile_seconds=3600) as hub:
        hub.create_dataset("local/facts")
        yield hub


@pytest.fixture
def files(hub: RunningHub) -> Iterator[LargeFiles]:
    """Empty before and after."""
    files = LargeFiles(hub.folder("local/facts"))
    yield files
    files.remove(list(files.oids()))


def signed(hub: RunningHub, operation: str, content: bytes = CONTENT) -> str:
    wanted = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content)}
    body = {"operation": operation, "objects": [wanted]}
    answer = hub.request("POST", "/datasets/local/facts.git/info/lfs/objects/batch", json=body)
    url: str = answer.json()["objects"][0]["actions"][operation]["href"]
    return url


def xorb_url(hub: RunningHub) -> tuple[str, dict[str, str]]:
    told = hub.request("GET", "/api/datasets/local/facts/xet-write-token/main").json()
    headers = {"Authorization": f"Bearer {told['accessToken']}"}
    return f"{told['casUrl']}/v1/xorbs/default/{'0' * 64}", headers


def open_files(files: LargeFiles) -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(link))
    return [name for name in found if name.startswith(str(files.incoming.parent))]


def in_the_middle(files: LargeFiles) -> bool:
    return any(path.stat().st_size > 0 for path in files.incoming.glob("*"))


def nothing_is_left(files: LargeFiles) -> bool:
    return not open_files(files) and not list(files.incoming.glob("*"))


@pytest.mark.parametrize("way", ["lfs", "xet"])
def test_a_sender_that_goes_away_leaves_nothing(
    hub: RunningHub, files: LargeFiles, way: str
) -> None:
    url, headers = (signed(hub, "upload"), {}) if way == "lfs" else xorb_url(hub)
    path = url.removeprefix(hub.url)
    method = "PUT" if way == "lfs" else "POST"
    with connected(hub.url) as client:
        client.sendall(request(hub.url, method, path, num_bytes=len(CONTENT), **headers))
        client.sendall(CONTENT[:6_000_000])
        wait_until(lambda: in_the_middle(files))
    wait_until(lambda: nothing_is_left(files))
    assert list(files.oids()) == []


def test_a_reader_that_goes_away_holds_nothing(hub: RunningHub, files: LargeFiles) -> None:
    files.store([CONTENT], OID, len(CONTENT))
    path = signed(hub, "download").removeprefix(hub.url)
    with connected(hub.url, reads_little=True) as client:
        client.sendall(request(hub.url, "GET", path))
        assert client.recv(12) == b"HTTP/1.1 200"
        wait_until(lambda: open_files(files))
    wait_until(lambda: not open_files(files))


def test_many_large_files_come_at_once(hub: RunningHub, files: LargeFiles) -> None:
    """Together they have many times what the hub keeps of other bodies."""
    contents = [bytes([number]) * 2_000_000 for number in range(20)]

    def send(content: bytes) -> int:
        url = signed(hub, "upload", content)
        return httpx.put(url, content=content, timeout=60).status_code

    with ThreadPoolExecutor(20) as pool:
        assert set(pool.map(send, contents)) == {200}
    assert len(list(files.oids())) == 20


def test_a_forged_url_is_refused_before_its_body_is_read(hub: RunningHub) -> None:
    path = f"{signed(hub, 'upload').removeprefix(hub.url)[:-1]}x"
    with connected(hub.url) as client:
        client.sendall(request(hub.url, "PUT", path, num_bytes=10**12))
        client.sendall(b"x" * 1000)
        assert client.recv(12) == b"HTTP/1.1 403"


PROGRAM = """
import asyncio, os, signal, sys
from pathlib import Path
from pipeline.hub.large_files import LargeFiles
folder, oid, size = sys.argv[1:]
def die(*_, **__):
    os.kill(os.getpid(), signal.SIGKILL)
async def body():
    yield sys.stdin.buffer.read(1_000_000)
    os.fsync = die
    yield sys.stdin.buffer.read()
asyncio.run(LargeFiles(Path(folder)).receive(body(), oid, int(size)))
"""


def test_a_hub_that_is_killed_clears_what_it_left(tmp_path: Path) -> None:
    with running_hub(tmp_path / "hub", reconcile_seconds=3600) as hub:
        hub.create_dataset("local/facts")
    folder = hub.folder("local/facts")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), OID, str(len(CONTENT))], input=CONTENT
    )
    assert done.returncode == -9
    files = LargeFiles(folder)
    assert list(files.incoming.iterdir())
    assert list(files.oids()) == []
    with running_hub(tmp_path / "hub", reconcile_seconds=3600) as hub:
        assert list(files.incoming.glob("*")) == []
        answer = httpx.put(signed(hub, "upload"), content=CONTENT, timeout=60)
        assert answer.status_code == 200
    assert files.path(OID).read_bytes() == CONTENT
