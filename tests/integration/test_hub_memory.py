"""A large file goes up and down within a bound on memory, on each of its ways.

`HUB_LARGE_BYTES=2000000000` makes the files 2 GB.
"""

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest
from huggingface_hub import CommitOperationAdd
from huggingface_hub._commit_api import _upload_files
from huggingface_hub.utils import _xet

from pipeline.formats import Pointer
from tests.hub_fixtures import (
    TOKEN,
    create_empty,
    git_env,
    repository_folder,
    run_git,
)
from tests.integration.test_hub_durability import HubProcess

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does"),
]

NUM_BYTES = int(os.environ.get("HUB_LARGE_BYTES", "200000000"))
MIB = 1024 * 1024
HUB_MIB = 60
"""By which the hub grows, whatever the size of the file."""
GIT_MIB = 64
"""What the largest git process of the hub takes."""

GIT = ("git", "/usr/lib/git-core/", "/usr/libexec/git-core/")
IS_OVER = (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError, IndexError)
"""What reading a process raises if it ends meanwhile."""


class MeasuredHub(HubProcess):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.headers = {"Authorization": f"Bearer {TOKEN}"}
        self.start()
        create_empty(self.url, "local/facts")
        self._before = mib(self.pid, "VmHWM")
        self._git: dict[str, int] = {}
        self._is_over = threading.Event()
        self._watch = threading.Thread(target=self._look_at_git)
        self._watch.start()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def push(self, worktree: Path, ref: str = "main") -> None:
        self.git("add", "-A", cwd=worktree)
        self.git("commit", "-qm", "one", cwd=worktree)
        self.git("push", "-q", f"{self.url}/datasets/local/facts", f"HEAD:{ref}", cwd=worktree)

    def sha256(self, path: str) -> str:
        """Of what the hub answers."""
        digest = hashlib.sha256()
        url = f"{self.url}/datasets/local/facts/resolve/main/{path}"
        with httpx.stream("GET", url, headers=self.headers, timeout=600) as answer:
            for piece in answer.raise_for_status().iter_bytes():
                digest.update(piece)
        return digest.hexdigest()

    def _look_at_git(self) -> None:
        """What git maps of a file is not counted: the system takes that back when it needs it."""
        hub = psutil.Process(self.pid)
        while not self._is_over.wait(0.01):
            with contextlib.suppress(psutil.NoSuchProcess):
                for each in hub.children(recursive=True):
                    with contextlib.suppress(*IS_OVER):
                        if not (command := " ".join(each.cmdline()[:6])).startswith(GIT):
                            continue  # the hub's own copy, which becomes git next
                        taken = max(self._git.get(command, 0), mib(each.pid, "RssAnon"))
                        self._git[command] = taken

    def check(self, at_most: int = HUB_MIB) -> None:
        """That the hub and its git processes kept to their bounds."""
        grown = mib(self.pid, "VmHWM") - self._before
        assert grown < at_most
        too_large = {command: mib for command, mib in self._git.items() if mib >= GIT_MIB}
        assert self._git and too_large == {}
        print(f"the hub took {grown} MiB more; the largest git {max(self._git.values())} MiB")

    def kill(self) -> None:
        self._is_over.set()
        self._watch.join()
        super().kill()


def mib(pid: int, what: str) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{what}:")[1].split()[0]) // 1024


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[MeasuredHub]:
    hub = MeasuredHub(tmp_path / "hub")
    yield hub
    hub.kill()


@pytest.fixture
def worktree(tmp_path: Path) -> Path:
    run_git("init", "-q", "work", cwd=tmp_path, env=git_env("http://127.0.0.1", TOKEN))
    return tmp_path / "work"


@pytest.fixture
def noise(tmp_path: Path) -> tuple[Path, str]:
    """A large file that cannot be compressed, and its sha256."""
    digest, file = hashlib.sha256(), tmp_path / "noise"
    with file.open("wb") as stream:
        left = NUM_BYTES
        while left:
            piece = os.urandom(min(left, MIB))
            digest.update(piece)
            stream.write(piece)
            left -= len(piece)
    return file, digest.hexdigest()


def test_a_file_of_git_lfs(hub: MeasuredHub, worktree: Path, noise: tuple[Path, str]) -> None:
    file, sha256 = noise
    pointer = Pointer(oid=sha256, size=NUM_BYTES)
    (worktree / "noise.bin").write_bytes(pointer.render())
    hub.push(worktree)
    wanted = {"operation": "upload", "objects": [{"oid": sha256, "size": NUM_BYTES}]}
    batch = f"{hub.url}/datasets/local/facts.git/info/lfs/objects/batch"
    told = httpx.post(batch, json=wanted, headers=hub.headers).json()
    with file.open("rb") as stream:
        url = told["objects"][0]["actions"]["upload"]["href"]
        sent = httpx.put(
            url,
            content=iter(lambda: stream.read(MIB), b""),
            headers={"Content-Length": str(NUM_BYTES)},
            timeout=600,
        )
    assert sent.status_code == 200
    assert hub.sha256("noise.bin") == sha256
    hub.check()


def test_a_file_of_xet(
    hub: MeasuredHub,
    worktree: Path,
    noise: tuple[Path, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_XET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(_xet, "_GLOBAL_XET_HOLDER", _xet.XetSessionHolder())
    file, sha256 = noise
    _upload_files(
        additions=[CommitOperationAdd(path_in_repo="noise.bin", path_or_fileobj=file)],
        repo_type="dataset",
        repo_id="local/facts",
        headers={"authorization": f"Bearer {TOKEN}"},
        endpoint=hub.url,
        revision="main",
    )
    (worktree / "noise.bin").write_bytes(Pointer(oid=sha256, size=NUM_BYTES).render())
    hub.push(worktree)
    assert hub.sha256("noise.bin") == sha256
    hub.check()


def test_a_file_of_git_itself(hub: MeasuredHub, worktree: Path, noise: tuple[Path, str]) -> None:
    file, sha256 = noise
    file.rename(worktree / "noise.bin")
    hub.push(worktree)
    assert hub.sha256("noise.bin") == sha256
    assert httpx.post(f"{hub.url}/api/settings/gc", headers=hub.headers, timeout=600).is_success
    assert list((repository_folder(hub.root, "local/facts") / "objects/pack").glob("*.pack"))
    assert hub.sha256("noise.bin") == sha256
    hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "clone", cwd=worktree.parent)
    hub.check()


def test_many_commits_with_long_lines(hub: MeasuredHub, tmp_path: Path) -> None:
    """A line of 60 MB takes several times as much while it is read. Two are read at a time."""
    body = tmp_path / "body"
    with body.open("wb") as stream:
        stream.write(b'{"key": "header", "value": {"summary": "Change"}}\n')
        stream.write(b'{"key": "file", "value": {"path": "a", "encoding": "base64", "content": "')
        for _ in range(60):
            stream.write(b"QUFB" * (MIB // 4))
        stream.write(b'"}}\n')
    url = f"{hub.url}/api/datasets/local/facts/commit/main"

    def send(_: int) -> int:
        with body.open("rb") as stream:
            content = iter(lambda: stream.read(MIB), b"")
            answer = httpx.post(url, content=content, headers=hub.headers, timeout=120)
            return answer.status_code

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(send, range(8))) == {200}
    hub.check(at_most=600)


def test_the_difference_of_a_large_pull_request(hub: MeasuredHub, worktree: Path) -> None:
    (worktree / "first").write_text("first")
    hub.push(worktree)
    opened = hub.api.create_pull_request("local/facts", "Large", repo_type="dataset")
    for number in range(12):
        (worktree / f"{number}.txt").write_text(f"{number} and some more words\n" * 400_000)
    hub.push(worktree, opened.git_reference)
    details = hub.api.get_discussion_details("local/facts", opened.num, repo_type="dataset")
    assert details.diff is not None and "is cut here" in details.diff
    grown = mib(hub.pid, "VmHWM") - hub._before
    assert grown < HUB_MIB
