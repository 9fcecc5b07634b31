"""A job gets the content of large files, from a hub and from any git repository with LFS."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from pipeline.hub.large_files.store import LargeFiles
from pipeline.pointers import Pointer
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.git_snapshot import GitDataset
from pipeline.retrain.lfs_address import Address, address_of
from pipeline.retrain.snapshot import DatasetHub
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
        self.files = LargeFiles(hub.root / "repos" / "datasets" / f"{name}.git")
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
    assert revision.files == ("other.jsonl", "train.jsonl")
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
    cached = tmp_path / "cache" / "lfs"
    assert len(list(cached.glob("*/*"))) == 3
    dataset.forget_others(second)
    assert len(list(cached.glob("*/*"))) == 2
    dataset.forget_others()
    assert list(cached.glob("*/*")) == []


def test_a_revision_of_pointers_that_an_older_version_downloaded_is_filled(
    remote: Remote, tmp_path: Path
) -> None:
    sha = remote.push(train=ROWS)
    folder = tmp_path / "cache" / "revisions" / sha
    folder.mkdir(parents=True)
    pointer = Pointer(oid=OID, size=len(ROWS)).render()
    (folder / "train.jsonl").write_bytes(pointer)
    GitDataset(remote.url_with_login, tmp_path / "cache").download(sha)
    assert (folder / "train.jsonl").read_bytes() == ROWS


def test_content_that_is_not_there_is_named(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    remote.files.remove([OID])
    named = r"train.jsonl is a pointer .* does not have this large file"
    with pytest.raises(SnapshotError, match=named) as raised:
        GitDataset(remote.url_with_login, tmp_path / "cache").download(sha)
    assert remote.hub.token not in str(raised.value)


@pytest.mark.parametrize("login", [f"hub:{TOKEN}", f"hub:a@{TOKEN}"])
def test_a_login_in_the_url_is_in_no_error(remote: Remote, tmp_path: Path, login: str) -> None:
    url = remote.url.replace("://", f"://{login}@").replace("/datasets/", "/datasets/elsewhere/")
    with pytest.raises(SnapshotError, match="could not be fetched from http://127") as raised:
        GitDataset(url, tmp_path / "cache").download("1" * 40)
    assert remote.hub.token not in str(raised.value)


def test_content_that_is_not_the_pointers_is_refused(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    remote.files.path(OID).write_bytes(ROWS.replace(b"one", b"two"))
    with pytest.raises(SnapshotError, match=r"train.jsonl .* what came has 1600 bytes"):
        GitDataset(remote.url_with_login, tmp_path / "cache").download(sha)
    assert [path for path in (tmp_path / "cache" / "lfs").rglob("*") if path.is_file()] == []


def test_a_wrong_login_is_told(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    dataset = GitDataset(remote.url_with_login, tmp_path / "cache")
    dataset._fetch(sha)
    other = GitDataset(remote.url.replace("://", "://hub:wrong@"), tmp_path / "cache")
    with pytest.raises(SnapshotError, match=r"Invalid credentials in Authorization header \(403\)"):
        other.download(sha)


def test_a_job_of_the_hub_learns_the_content(remote: Remote, tmp_path: Path) -> None:
    sha = remote.push(train=ROWS)
    source = DatasetHub(remote.name, tmp_path / "cache", endpoint=remote.hub.url, token=TOKEN)
    revision = source.download(sha)
    assert (revision.folder / "train.jsonl").read_bytes() == ROWS


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
    with pytest.raises(SnapshotError, match="it has only the pointer"):
        dataset.download(sha)
    path = objects / OID[:2] / OID[2:4] / OID
    path.parent.mkdir(parents=True)
    path.write_bytes(ROWS)
    assert (dataset.download(sha).folder / "train.jsonl").read_bytes() == ROWS


class Server:
    """An LFS server as GitHub has one: the content is on another host, with headers of its own."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, dict[str, str]]] = []
        self.answers: dict[str, tuple[int, bytes]] = {}
        asked, answers = self.asked, self.answers

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.rfile.read(int(self.headers.get("Content-Length", 0)))
                asked.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                status, body = answers.get(self.path, (404, b""))
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", body.decode())
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def servers() -> Iterator[tuple[Server, Server]]:
    both = Server(), Server()
    yield both
    for server in both:
        server.close()


def fill(server: Server, folder: Path) -> bytes:
    from pipeline.retrain.large_files import LargeFiles as Fetched

    folder.mkdir(exist_ok=True)
    (folder / "train.jsonl").write_bytes(Pointer(oid=OID, size=len(ROWS)).render())
    url = f"http://me:secret@{server.address}/team/rows"
    Fetched(url, folder / "cache").fill(folder, ["train.jsonl"])
    return (folder / "train.jsonl").read_bytes()


def answer_batch(server: Server, action: Any, oid: str = OID) -> None:
    objects = [{"oid": oid, "size": len(ROWS), "actions": {"download": action}}]
    body = json.dumps({"transfer": "basic", "objects": objects}).encode()
    server.answers["/team/rows.git/info/lfs/objects/batch"] = (200, body)


def test_content_on_another_host_is_fetched_without_the_login(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    server, storage = servers
    href = f"http://{storage.address}/content?signature=1"
    answer_batch(server, {"href": href, "header": {"X-Part": "one"}})
    storage.answers["/content?signature=1"] = (302, f"http://{storage.address}/moved".encode())
    storage.answers["/moved"] = (200, ROWS)
    assert fill(server, tmp_path) == ROWS
    [(_, batch)] = server.asked
    assert batch["authorization"].startswith("Basic ")
    assert batch["accept"] == batch["content-type"] == "application/vnd.git-lfs+json"
    assert [(path, headers.get("x-part")) for path, headers in storage.asked] == [
        ("/content?signature=1", "one"),
        ("/moved", "one"),
    ]
    assert not any("authorization" in headers for _, headers in storage.asked)


def test_content_on_the_same_host_is_fetched_with_the_login(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    server, _ = servers
    answer_batch(server, {"href": f"http://{server.address}/content"})
    server.answers["/content"] = (200, ROWS)
    assert fill(server, tmp_path) == ROWS
    assert server.asked[1][1]["authorization"] == server.asked[0][1]["authorization"]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"<html>", "its LFS server sent an answer"),
        (b"[]", "its LFS server sent an answer"),
        (b'{"objects": []}', "its LFS server sent an answer"),
        (b'{"objects": [{"oid": "%s"}]}' % OID.encode(), "its LFS server sent an answer"),
        (
            b'{"objects": [{"oid": "%s", "error": {"code": 410, "message": "gone"}}]}'
            % OID.encode(),
            r"gone \(410\)",
        ),
    ],
)
def test_an_answer_that_is_none_is_told(
    servers: tuple[Server, Server], tmp_path: Path, body: bytes, reason: str
) -> None:
    server, _ = servers
    server.answers["/team/rows.git/info/lfs/objects/batch"] = (200, body)
    with pytest.raises(SnapshotError, match=f"train.jsonl is a pointer .*{reason}"):
        fill(server, tmp_path)


@pytest.mark.parametrize("href", ["ftp://127.0.0.1/x", "http://[", "content"])
def test_an_address_that_is_none_is_told(
    servers: tuple[Server, Server], tmp_path: Path, href: str
) -> None:
    server, _ = servers
    answer_batch(server, {"href": href})
    with pytest.raises(SnapshotError, match=r"train\.jsonl is a pointer"):
        fill(server, tmp_path)


def test_a_server_that_is_away_is_asked_again_later(
    servers: tuple[Server, Server], tmp_path: Path
) -> None:
    server, storage = servers
    answer_batch(server, {"href": f"http://{storage.address}/content"})
    storage.close()
    try:
        with pytest.raises(HubAway, match=r"train\.jsonl is a pointer"):
            fill(server, tmp_path)
    finally:
        storage.__init__()  # type: ignore[misc]
    answer_batch(server, {"href": f"http://{server.address}/content"})
    server.answers["/content"] = (503, b"")
    with pytest.raises(HubAway, match="answered 503"):
        fill(server, tmp_path)


SSH = """#!/bin/sh
echo "$@" > {told}
{answer}
"""


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("https://host.example/a/b", "https://host.example/a/b.git/info/lfs"),
        ("https://host.example/a/b.git/", "https://host.example/a/b.git/info/lfs"),
        ("http://127.0.0.1:80/a", "http://127.0.0.1:80/a.git/info/lfs"),
        ("git://host.example/a/b", "https://host.example/a/b.git/info/lfs"),
        ("git@host.example:a/b.git", "https://host.example/a/b.git/info/lfs"),
        ("ssh://git@host.example:2222/a/b", "https://host.example/a/b.git/info/lfs"),
    ],
)
def test_the_address_is_derived_as_git_lfs_does(
    url: str, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(told=tmp_path / "told", answer="exit 1"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert address_of(url) == Address(url=address)


def test_a_server_behind_ssh_says_where_its_files_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = '{"href": "https://lfs.example/a/", "header": {"Authorization": "RemoteAuth 1"}}'
    ssh = tmp_path / "ssh"
    ssh.write_text(SSH.format(told=tmp_path / "told", answer=f"echo '{answer}'"))
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    expected = Address(url="https://lfs.example/a", headers={"Authorization": "RemoteAuth 1"})
    assert address_of("ssh://git@host.example:2222/a/b c.git") == expected
    told = (tmp_path / "told").read_text().strip()
    assert told.endswith("-p 2222 -- git@host.example git-lfs-authenticate 'a/b c.git' download")
    assert address_of("git@host.example:it's.git") == expected
    assert "git-lfs-authenticate 'it'\\''s.git' download" in (tmp_path / "told").read_text()


def test_a_login_in_the_address_is_not_sent_elsewhere() -> None:
    found = address_of("https://me:se%3Acret@host.example/a")
    assert isinstance(found, Address)
    assert found.url == "https://host.example/a.git/info/lfs"
    assert found.headers == {"Authorization": "Basic bWU6c2U6Y3JldA=="}
