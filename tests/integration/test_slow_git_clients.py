"""Clients of git that stop in the middle: they keep no push out, and hold nothing for long."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from serving.http.server import Limits
from tests.hub_fixtures import TOKEN, RunningHub, commit_file, running_hub, wait_until
from tests.slow_clients import connected, num_ended, outlive, request

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts open files")

NUM_SLOTS = 2
SHORT = Limits(body_seconds=0.4, reading_seconds=0.4)


@contextlib.contextmanager
def hub_with_data(folder: Path, limits: Limits | None = None) -> Iterator[tuple[RunningHub, Path]]:
    """And a clone from which a commit was pushed that no system keeps for its client."""
    with running_hub(folder / "hub", limits=limits, max_git_processes=NUM_SLOTS) as hub:
        work = folder / "work"
        hub.git("clone", "-q", hub.create_dataset("local/facts"), str(work), cwd=folder)
        (work / "noise").write_bytes(os.urandom(8 * 2**20))  # not to be compressed
        commit_file(hub, work, "facts.txt", "1")
        hub.git("push", "-q", "origin", "HEAD:main", cwd=work)
        yield hub, work


def post(hub: RunningHub, service: str, num_bytes: int) -> bytes:
    return request(
        hub.url,
        "POST",
        f"/datasets/local/facts/{service}",
        num_bytes=num_bytes,
        Authorization=f"Bearer {TOKEN}",
        Content_Type=f"application/x-{service}-request",
    )


@contextlib.contextmanager
def unread_clones(hub: RunningHub, sha: str, number: int) -> Iterator[list[socket.socket]]:
    want = f"0032want {sha}\n00000009done\n".encode()
    with contextlib.ExitStack() as stack:
        clients = [
            stack.enter_context(connected(hub.url, reads_little=True)) for _ in range(number)
        ]
        for client in clients:
            client.sendall(post(hub, "git-upload-pack", len(want)) + want)
            assert client.recv(12) == b"HTTP/1.1 200"
        yield clients


def git_processes() -> list[psutil.Process]:
    return [
        one
        for one in psutil.Process().children(recursive=True)
        if one.status() != psutil.STATUS_ZOMBIE and "git" in one.name()
    ]


def files_of_pushes(hub: RunningHub) -> int:
    names = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(link))
    return sum(name.startswith(str(hub.root / "incoming")) for name in names)


def test_clones_that_nobody_reads_keep_no_push_out(tmp_path: Path) -> None:
    with hub_with_data(tmp_path) as (hub, work):
        head = hub.git("rev-parse", "HEAD", cwd=work)
        with unread_clones(hub, head, NUM_SLOTS) as clients:
            sha = commit_file(hub, work, "facts.txt", "2")
            hub.git("push", "-q", "origin", "HEAD:main", cwd=work)
            for version in (0, 2):
                protocol = ("-c", f"protocol.version={version}")
                listed = hub.git(*protocol, "ls-remote", "origin", "refs/heads/main", cwd=work)
                assert listed.split()[0] == sha
            assert num_ended(clients) == 0, "they were in the way all the time"


@pytest.mark.slow
def test_a_clone_that_nobody_reads_gives_its_slot_back(tmp_path: Path) -> None:
    with hub_with_data(tmp_path, SHORT) as (hub, work):
        head = hub.git("rev-parse", "HEAD", cwd=work)
        with unread_clones(hub, head, NUM_SLOTS):
            hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "copy", cwd=tmp_path)
            assert (tmp_path / "copy/facts.txt").read_text() == "1"
            wait_until(lambda: not git_processes())


def test_a_push_that_stops_holds_no_file(tmp_path: Path) -> None:
    with (
        running_hub(tmp_path / "hub", limits=SHORT) as hub,
        contextlib.ExitStack() as stack,
    ):
        hub.create_dataset("local/facts")
        clients = {}
        for number in range(20):
            clients[str(number)] = stack.enter_context(connected(hub.url))
            half = post(hub, "git-receive-pack", 2**30) + b"\0" * 1000
            clients[str(number)].sendall(half)
        wait_until(lambda: files_of_pushes(hub))
        assert outlive(clients, {}, within_seconds=30) == []
        wait_until(lambda: not files_of_pushes(hub))
