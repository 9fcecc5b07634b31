"""SIGKILL at bad moments, a hub that stops and starts again, and a push that breaks off."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi

from pipeline.hub.errors import HubError
from tests.hub_fixtures import (
    SECRET_KEY,
    TOKEN,
    Receiver,
    RunningHub,
    commit_file,
    create_empty,
    git_env,
    push_file,
    recording_receiver,
    run_git,
    running_hub,
    wait_until,
)
from tests.ports import free_port
from tests.slow_clients import connected, request

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "user", "name": "local"}]

PROGRAM = """
import os, signal, sys
from pathlib import Path
import uvicorn
from jobs.store import JobStore
from pipeline.hub.app import create_app
from pipeline.hub.routes import git_http
from pipeline.hub.settings import HubSettings
root, port, token, key, fault = sys.argv[1:]
if fault:
    # The worst moment: git has moved the refs, the hub knows nothing of it yet.
    git_http.record_ref_changes = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
settings = HubSettings(
    port=int(port), delivery_schedule_seconds=(0,) + (0.05,) * 50,
    refused_seconds=0.1,
)
store = JobStore.open(Path(root).with_name("jobs.sqlite"))
app = create_app(
    settings, Path(root), token=token, secret_key=key.encode(), jobs_store=store,
    jobs_dir=Path(root).with_name("jobs"), needed_commits=set,
)
uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning")
"""


class HubProcess:
    def __init__(self, root: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.root = root
        self.env = git_env(self.url, TOKEN)
        self.api = HfApi(endpoint=self.url, token=TOKEN)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, fault: str = "") -> None:
        arguments = [str(self.root), str(self.port), TOKEN, SECRET_KEY.decode(), fault]
        self.process = subprocess.Popen([sys.executable, "-c", PROGRAM, *arguments])
        wait_until(self._answers, every_seconds=0.05)

    def _answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def git(self, *arguments: str, cwd: Path, check: bool = True) -> str:
        return run_git(*arguments, cwd=cwd, env=self.env, check=check)


@pytest.fixture
def hub_process(tmp_path: Path) -> Iterator[HubProcess]:
    hub = HubProcess(tmp_path / "hub")
    hub.start()
    yield hub
    hub.kill()


def make_worktree(hub: HubProcess, folder: Path) -> Path:
    create_empty(hub.url, "local/facts")
    url = f"{hub.url}/datasets/local/facts"
    hub.git("clone", "-q", url, str(folder), cwd=folder.parent)
    return folder


def new_shas(receiver: Receiver) -> list[str]:
    return [ref["newSha"] for one in receiver.received for ref in one.json.get("updatedRefs", [])]


def test_a_push_before_a_kill_is_delivered_after_it(
    hub_process: HubProcess, tmp_path: Path
) -> None:
    hub = hub_process
    worktree = make_worktree(hub, tmp_path / "facts")
    port = free_port()
    hub.api.create_webhook(url=f"http://127.0.0.1:{port}/", watched=WATCHED)
    sha = push_file(hub, worktree, "a.txt", "1")
    hub.kill()
    with recording_receiver(port) as receiver:
        hub.start()
        receiver.wait_for(1)
        assert new_shas(receiver) == [sha]


def test_the_gap_between_git_and_the_database_is_closed_at_start(
    hub_process: HubProcess, receiver: Receiver, tmp_path: Path
) -> None:
    hub = hub_process
    worktree = make_worktree(hub, tmp_path / "facts")
    hub.api.create_webhook(url=receiver.url, watched=WATCHED)
    hub.kill()
    hub.start("before-record")
    sha = commit_file(hub, worktree, "a.txt", "1")
    said = hub.git("push", "origin", "main", cwd=worktree, check=False)
    assert "new branch" not in said  # the hub died before it could answer
    assert hub.process is not None
    assert hub.process.wait(timeout=30) == -signal.SIGKILL
    assert new_shas(receiver) == []
    hub.start()
    receiver.wait_for(1)
    assert new_shas(receiver) == [sha]
    assert hub.git("push", "origin", "main", cwd=worktree) == "Everything up-to-date"


def test_refs_that_moved_behind_the_hubs_back_are_told_within_the_interval(
    receiver: Receiver, tmp_path: Path
) -> None:
    with running_hub(tmp_path / "hub", reconcile_seconds=0.05) as hub:
        hub.create_dataset("local/facts")
        hub.api.create_webhook(url=receiver.url, watched=WATCHED)
        bare = hub.folder("local/facts")
        tree = hub.git("--git-dir", str(bare), "mktree", cwd=tmp_path)
        sha = hub.git("--git-dir", str(bare), "commit-tree", "-m", "By hand", tree, cwd=tmp_path)
        hub.git("--git-dir", str(bare), "update-ref", "refs/heads/main", sha, cwd=tmp_path)
        receiver.wait_for(1)
        assert new_shas(receiver) == [sha]


def test_at_start_a_lost_folder_ends_its_repository_and_an_unknown_one_is_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder of an older backup is lost, or the database is."""
    root = tmp_path / "hub"
    with running_hub(root) as hub:
        hub.create_dataset("local/lost")
        hub.create_dataset("local/facts")
        hub.folder("local/lost").rename(root / "repos/brought.git")
    with running_hub(root) as hub:
        assert [one.id for one in hub.api.list_datasets()] == ["local/facts"]
    assert "removing dataset local/lost from the hub" in caplog.text
    assert "ignores the folder" in caplog.text
    assert (root / "repos/brought.git/HEAD").exists()


def test_a_second_hub_in_one_folder_is_refused(hub: RunningHub) -> None:
    with pytest.raises(HubError, match="Another hub uses"), running_hub(hub.root):
        pass
    assert hub.api.whoami()["name"] == "local"


def test_a_push_that_breaks_off_changes_nothing(hub: RunningHub, worktree: Path) -> None:
    path = "/datasets/local/facts/git-receive-pack"
    headers = {"Authorization": f"Bearer {hub.token}"}
    headers["Content_Type"] = "application/x-git-receive-pack-request"
    with connected(hub.url) as client:
        client.sendall(request(hub.url, "POST", path, num_bytes=1_000_000, **headers) + b"00")
    sha = push_file(hub, worktree, "a.txt", "1")
    assert hub.api.dataset_info("local/facts").sha == sha
    wait_until(lambda: not list((hub.root / "incoming").iterdir()))


def test_a_push_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    with running_hub(tmp_path / "hub", max_push_bytes=1000) as hub:
        url = hub.create_dataset("local/facts")
        hub.git("init", "-q", "facts", cwd=tmp_path)
        commit_file(hub, tmp_path / "facts", "a.txt", os.urandom(5000).hex())
        assert "413" in hub.git("push", url, "main", cwd=tmp_path / "facts", check=False)
        assert hub.api.dataset_info("local/facts").sha is None


def test_a_ref_whose_file_is_damaged_is_not_taken_for_deleted(
    tmp_path: Path, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    with running_hub(tmp_path / "hub", reconcile_seconds=0.05) as hub:
        hub.create_dataset("local/facts")
        hub.api.create_webhook(url=receiver.url, watched=WATCHED)

        def upload(name: str) -> str:
            made = hub.api.upload_file(
                path_or_fileobj=b"x", path_in_repo=name, repo_id="local/facts", repo_type="dataset"
            )
            return made.oid

        first = upload("a.txt")
        [event] = receiver.wait_for(1)
        main = hub.folder("local/facts") / "refs/heads/main"
        for damage in ("", "garbage\n"):
            caplog.clear()
            main.write_text(damage)
            wait_until(lambda: "broken ref refs/heads/main" in caplog.text)
        main.write_text(f"{first}\n")  # as its message says: from a backup
        second = upload("b.txt")
        [*_, last] = receiver.wait_for(2)
        told = [each.json["updatedRefs"][0] for each in (event, last)]
        assert len(receiver.received) == 2
        assert [each["newSha"] for each in told] == [first, second]
