"""A job gets the content of large files, from a hub and from any git repository with LFS."""

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.formats import Pointer
from pipeline.hub.large_files import LargeFiles
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.sources import GitDataset
from tests.hub_fixtures import TOKEN, RunningHub, git_env, run_git, running_hub

ENV = git_env("http://127.0.0.1", "unused")
ROWS = b'{"text": "one"}\n' * 100
OID = hashlib.sha256(ROWS).hexdigest()
LFS = "*.jsonl filter=lfs diff=lfs merge=lfs -text\n"


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    with running_hub(tmp_path_factory.mktemp("lfs") / "hub", reconcile_seconds=3600) as hub:
        yield hub


class Remote:
    """A dataset on the hub with large files, pushed without git-lfs."""

    def __init__(self, hub: RunningHub, name: str, worktree: Path) -> None:
        self.hub, self.name, self.worktree = hub, name, worktree
        hub.create_dataset(name)
        hub.git("init", "-q", str(worktree), cwd=worktree.parent)
        self.files = LargeFiles(hub.folder(name))
        (worktree / ".gitattributes").write_text(LFS)
        # Wherever the repository itself sends its clients, no job goes.
        (worktree / ".lfsconfig").write_text("[lfs]\n\turl = http://127.0.0.1:9/elsewhere\n")

    @property
    def url(self) -> str:
        return f"{self.hub.url}/datasets/{self.name}"

    @property
    def url_with_login(self) -> str:
        return self.url.replace("://", f"://hub:{TOKEN}@")

    def push(self, **contents: bytes) -> str:
        for name, content in contents.items():
            oid = self.files.store([content], None, len(content))
            pointer = Pointer(oid=oid, size=len(content))
            (self.worktree / f"{name}.jsonl").write_bytes(pointer.render())
        self.hub.git("add", "-A", cwd=self.worktree)
        self.hub.git("commit", "-qm", "rows", cwd=self.worktree)
        self.hub.git("push", "-q", self.url, "HEAD:main", cwd=self.worktree)
        return self.hub.git("rev-parse", "HEAD", cwd=self.worktree)


@pytest.fixture
def remote(
    hub: RunningHub,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> Remote:
    # Pushes and jobs with this machine's own git-lfs, if it has one, must see no difference.
    monkeypatch.setenv("GIT_LFS_SKIP_PUSH", "1")
    name = hashlib.sha256(request.node.name.encode()).hexdigest()[:12]
    return Remote(hub, f"local/{name}", tmp_path / "work")


def test_a_job_of_a_git_url_learns_the_content(remote: Remote, tmp_path: Path) -> None:
    (remote.worktree / "picture.png").write_bytes(Pointer(oid="0" * 64, size=9).render())
    sha = remote.push(train=ROWS, other=b'{"text": "two"}\n')
    dataset = GitDataset(remote.url_with_login, tmp_path / "cache")
    revision = dataset.download(sha)
    others = {".gitattributes", ".lfsconfig", "picture.png"}
    assert set(revision.files) == {"other.jsonl", "train.jsonl"} | others
    assert (revision.folder / "train.jsonl").read_bytes() == ROWS
    # No row is in it, so nobody asks for its content.
    assert (revision.folder / "picture.png").read_bytes().startswith(b"version https://git-lfs")
    assert dataset.download(sha) == revision


def test_the_login_comes_from_the_helpers_of_git(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sha = remote.push(train=ROWS)
    for name, value in remote.hub.git_env.items():
        monkeypatch.setenv(name, value)
    revision = GitDataset(remote.url, tmp_path / "cache").download(sha)
    assert (revision.folder / "train.jsonl").read_bytes() == ROWS


def test_only_what_changed_is_fetched(remote: Remote, tmp_path: Path) -> None:
    first = remote.push(same=ROWS, changing=b'{"text": "old"}\n')
    dataset = GitDataset(remote.url_with_login, tmp_path / "cache")
    dataset.download(first)
    second = remote.push(changing=b'{"text": "new"}\n')
    remote.files.remove([OID])  # so that it can be fetched no more
    revision = dataset.download(second)
    assert (revision.folder / "same.jsonl").read_bytes() == ROWS
    assert (revision.folder / "changing.jsonl").read_bytes() == b'{"text": "new"}\n'
    cached = tmp_path / "cache/repository.git/lfs/objects"
    assert len(list(cached.glob("*/*/*"))) == 3
    dataset.forget_others(second)
    assert len(list(cached.glob("*/*/*"))) == 2
    dataset.forget_others()
    assert list(cached.glob("*/*/*")) == []


def test_content_that_is_not_there_is_named(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    remote.files.remove([OID])
    named = r"train.jsonl is a pointer .* does not have this large file"
    with pytest.raises(SnapshotError, match=named) as raised:
        GitDataset(remote.url_with_login, tmp_path / "cache").download(sha)
    assert remote.hub.token not in str(raised.value)


def test_a_wrong_login_and_a_server_that_is_away_are_told(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    GitDataset(remote.url_with_login, tmp_path / "cache")._fetch(sha)
    other = GitDataset(remote.url.replace("://", "://hub:wrong@"), tmp_path / "cache")
    with pytest.raises(SnapshotError, match="Invalid credentials in Authorization header"):
        other.download(sha)
    with pytest.raises(HubAway, match="connection refused"):  # a job is tried again after this one
        GitDataset("http://127.0.0.1:9/a/b", tmp_path / "cache").download(sha)


@pytest.mark.parametrize("login", [f"hub:{TOKEN}", f"hub:a@{TOKEN}"])
def test_a_login_in_the_url_is_in_no_error(remote: Remote, tmp_path: Path, login: str) -> None:
    url = remote.url.replace("://", f"://{login}@").replace("/datasets/", "/datasets/elsewhere/")
    with pytest.raises(SnapshotError, match="could not be fetched from http://127") as raised:
        GitDataset(url, tmp_path / "cache").download("1" * 40)
    assert remote.hub.token not in str(raised.value)


def test_content_that_is_not_the_pointers_is_refused(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    remote.files.path(OID).write_bytes(ROWS.replace(b"one", b"two"))
    with pytest.raises(SnapshotError, match=rf"train.jsonl .* expected OID {OID}, got"):
        GitDataset(remote.url_with_login, tmp_path / "cache").download(sha)
    assert not list((tmp_path / "cache/repository.git/lfs/objects").glob("*/*/*"))


def test_without_git_lfs_only_a_dataset_with_large_files_is_refused(
    remote: Remote, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = remote.push(train=ROWS)
    (remote.worktree / ".gitattributes").unlink()
    (remote.worktree / "train.jsonl").write_bytes(ROWS)
    small = remote.push()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/git").symlink_to(shutil.which("git") or "")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    dataset = GitDataset(remote.url_with_login, tmp_path / "cache")
    assert (dataset.download(small).folder / "train.jsonl").read_bytes() == ROWS
    with pytest.raises(SnapshotError, match="git-lfs is not installed; install git-lfs") as raised:
        dataset.download(large)
    assert remote.hub.token not in str(raised.value)


@pytest.mark.parametrize("is_bare", [True, False])
def test_a_repository_on_this_machine(tmp_path: Path, is_bare: bool) -> None:
    work = tmp_path / "work"
    run_git("init", "-q", str(work), cwd=tmp_path, env=ENV)
    (work / "train.jsonl").write_bytes(Pointer(oid=OID, size=len(ROWS)).render())
    run_git("add", "-A", cwd=work, env=ENV)
    run_git("commit", "-qm", "rows", cwd=work, env=ENV)
    sha = run_git("rev-parse", "HEAD", cwd=work, env=ENV)
    place, objects = work, work / ".git" / "lfs" / "objects"
    if is_bare:
        place, objects = tmp_path / "bare.git", tmp_path / "bare.git" / "lfs" / "objects"
        run_git("clone", "-q", "--bare", str(work), str(place), cwd=tmp_path, env=ENV)
    dataset = GitDataset(f"file://{place}", tmp_path / "cache")
    with pytest.raises(SnapshotError, match="remote missing object"):
        dataset.download(sha)
    path = objects / OID[:2] / OID[2:4] / OID
    path.parent.mkdir(parents=True)
    path.write_bytes(ROWS)
    assert (dataset.download(sha).folder / "train.jsonl").read_bytes() == ROWS
