"""A large file goes up and down within a bound on memory, on each of its ways.

`HUB_LARGE_BYTES=2000000000` makes the files 2 GB.
"""

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub._commit_api import _upload_files
from huggingface_hub.utils import _xet

from pipeline.hub.pointers import Pointer
from tests.hub_fixtures import (
    SECRET_KEY,
    TOKEN,
    git_env,
    listening_socket,
    run_git,
    wait_until,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does"),
]

NUM_BYTES = int(os.environ.get("HUB_LARGE_BYTES", "200000000"))
MIB = 1024 * 1024
HUB_MIB = 60
"""By which the hub grows, whatever the size of the file."""
GIT_MIB = 100
"""What the largest git process of the hub takes."""

PROGRAM = """
import json, resource, sys
from pathlib import Path
import uvicorn
from pipeline.hub.app import create_app
from pipeline.hub.settings import HubSettings
root, port, token, key = sys.argv[1:]
app = create_app(HubSettings(port=int(port)), Path(root), token=token, secret_key=key.encode())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
except KeyboardInterrupt:
    # In KiB. Of the children it is the largest one's.
    hub = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    git = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(json.dumps({"hub": hub // 1024, "git": git // 1024}), flush=True)
"""


class MeasuredHub:
    def __init__(self, root: Path) -> None:
        listener = listening_socket()
        port = listener.getsockname()[1]
        listener.close()
        self.url = f"http://127.0.0.1:{port}"
        self.root = root
        self.api = HfApi(endpoint=self.url, token=TOKEN)
        self.headers = {"Authorization": f"Bearer {TOKEN}"}
        arguments = [str(root), str(port), TOKEN, SECRET_KEY.decode()]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, text=True
        )
        wait_until(self._answers, every_seconds=0.05)
        self.api.create_repo("local/facts", repo_type="dataset")

    def _answers(self) -> bool:
        assert self._process.poll() is None
        try:
            return httpx.get(f"{self.url}/health", verify=False).status_code == 200
        except httpx.TransportError:
            return False

    def push(self, worktree: Path) -> None:
        env = git_env(self.url, TOKEN)
        remote = f"{self.url}/datasets/local/facts"
        run_git("add", "-A", cwd=worktree, env=env)
        run_git("commit", "-qm", "one", cwd=worktree, env=env)
        run_git("push", "-q", remote, "HEAD:main", cwd=worktree, env=env)

    def sha256(self, path: str) -> str:
        """Of what the hub answers."""
        digest = hashlib.sha256()
        url = f"{self.url}/datasets/local/facts/resolve/main/{path}"
        with httpx.stream("GET", url, headers=self.headers, timeout=600, verify=False) as answer:
            for piece in answer.raise_for_status().iter_bytes():
                digest.update(piece)
        return digest.hexdigest()

    def stop(self) -> dict[str, int]:
        """The most MiB that it took."""
        self._process.send_signal(signal.SIGINT)
        output, _ = self._process.communicate(timeout=60)
        taken: dict[str, int] = json.loads(output.splitlines()[-1])
        return taken

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


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
    told = httpx.post(batch, json=wanted, headers=hub.headers, verify=False).json()
    with file.open("rb") as stream:
        url = told["objects"][0]["actions"]["upload"]["href"]
        sent = httpx.put(
            url,
            content=iter(lambda: stream.read(MIB), b""),
            headers={"Content-Length": str(NUM_BYTES)},
            timeout=600,
            verify=False,
        )
    assert sent.status_code == 200
    assert hub.sha256("noise.bin") == sha256
    taken = hub.stop()
    print(taken)
    assert (taken["hub"] < HUB_MIB, taken["git"] < GIT_MIB) == (True, True), taken


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
    taken = hub.stop()
    print(taken)
    assert (taken["hub"] < HUB_MIB, taken["git"] < GIT_MIB) == (True, True), taken


def test_a_file_of_git_itself(hub: MeasuredHub, worktree: Path, noise: tuple[Path, str]) -> None:
    file, sha256 = noise
    file.rename(worktree / "noise.bin")
    hub.push(worktree)
    assert hub.sha256("noise.bin") == sha256
    assert httpx.post(
        f"{hub.url}/api/settings/gc", headers=hub.headers, timeout=600, verify=False
    ).is_success
    assert list((hub.root / "repos/datasets/local/facts.git/objects/pack").glob("*.pack"))
    assert hub.sha256("noise.bin") == sha256
    env = git_env(hub.url, TOKEN)
    run_git("clone", "-q", f"{hub.url}/datasets/local/facts", "clone", cwd=worktree.parent, env=env)
    taken = hub.stop()
    print(taken)
    assert (taken["hub"] < HUB_MIB, taken["git"] < GIT_MIB) == (True, True), taken
