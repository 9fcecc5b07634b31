"""Snapshots of real repositories by their URL, without a hub."""

import os
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from jobs.errors import is_temporary
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.job import take_snapshot
from pipeline.retrain.sources import GitDataset, Revision
from tests.disk_fixtures import fill, small_disk
from tests.hub_fixtures import git_env, run_git
from tests.retrain_fixtures import seen_by_a_release

ENV = git_env("http://127.0.0.1", "unused")


@pytest.fixture
def remote(tmp_path: Path) -> Path:
    """A bare repository, with a clone beside it at `clone`."""
    run_git("init", "-q", "--bare", "remote.git", cwd=tmp_path, env=ENV)
    run_git("clone", "-q", f"file://{tmp_path}/remote.git", "clone", cwd=tmp_path, env=ENV)
    return tmp_path / "remote.git"


def push(remote: Path, text: str, *options: str) -> str:
    clone = remote.with_name("clone")
    (clone / "data").mkdir(exist_ok=True)
    (clone / "data" / "rows.jsonl").write_text(text)
    run_git("add", "-A", cwd=clone, env=ENV)
    run_git("commit", "-qm", "rows", *options, cwd=clone, env=ENV)
    run_git("push", "-q", "--force", "origin", "HEAD:main", cwd=clone, env=ENV)
    return run_git("rev-parse", "HEAD", cwd=clone, env=ENV)


def test_a_revision_is_its_data_files_at_that_commit(remote: Path, tmp_path: Path) -> None:
    (tmp_path / "clone" / ".gitattributes").write_text("* export-ignore\n")
    (tmp_path / "clone" / "secret.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
    (tmp_path / "elsewhere.jsonl").write_text('{"text": "of this machine"}\n')
    first, second = push(remote, "one"), push(remote, "two")
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    assert dataset.head("refs/heads/main") == second
    revision = dataset.download(first)
    assert revision.files == (".gitattributes", "data/rows.jsonl", "secret.jsonl")
    assert (revision.folder / "data/rows.jsonl").read_text() == "one"
    link = revision.folder / "secret.jsonl"
    assert not link.is_symlink() and "of this machine" not in link.read_text()

    assert (dataset.download(second).folder / "data/rows.jsonl").read_text() == "two"
    assert dataset.is_ancestor(first, second) and not dataset.is_ancestor(second, first)
    dataset.forget_others(second)
    assert [path.name for path in revision.folder.parent.iterdir()] == [second]
    assert dataset.download(first) == revision, "from what was fetched before"


def test_a_commit_without_files_is_an_empty_revision(remote: Path, tmp_path: Path) -> None:
    first = push(remote, "one")
    clone = tmp_path / "clone"
    run_git("rm", "-q", "-r", ".", cwd=clone, env=ENV)
    run_git("commit", "-qm", "nothing left", cwd=clone, env=ENV)
    run_git("push", "-q", "origin", "HEAD:main", cwd=clone, env=ENV)
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    revision = dataset.download(dataset.head("refs/heads/main"))
    assert revision.files == ()
    assert dataset.is_ancestor(first, revision.sha)


def test_a_data_file_whose_name_is_not_utf_8_is_named(remote: Path, tmp_path: Path) -> None:
    """Other files of the repository may have any name."""
    clone = os.fsencode(tmp_path / "clone")
    Path(os.fsdecode(clone + b"/r\xe9sum\xe9.pdf")).write_text("other")
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    revision = dataset.download(push(remote, "one"))
    assert revision.files == ("data/rows.jsonl",)
    assert Revision.model_validate_json(revision.model_dump_json()) == revision
    Path(os.fsdecode(clone + b"/donn\xe9es.csv")).write_text("text\na\n")
    with pytest.raises(SnapshotError, match=r"^donn\?es.csv: its name is not UTF-8; rename the"):
        dataset.download(push(remote, "two"))


def test_a_commit_that_was_pushed_away(remote: Path, tmp_path: Path) -> None:
    base, first = push(remote, "zero"), push(remote, "one")
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    dataset.download(first)
    amended = push(remote, "other", "--amend")
    dataset.download(amended)
    assert not dataset.is_ancestor(first, amended)
    assert dataset.is_ancestor(base, amended)


@pytest.mark.parametrize(
    ("url", "reason", "is_away"),
    [
        ("file:///no/such/repository.git", "could not be fetched from file:///no/such", False),
        ("ext://sh -c id", "could not be fetched", False),
        ("http://127.0.0.1:9/x.git", "could not be fetched from http://127.0.0.1:9/x.git", True),
        ("git://127.0.0.1:9/x.git", "unable to connect to 127.0.0.1", True),
        ("ssh://127.0.0.1:9/x.git", "port 9: Connection refused", True),
    ],
)
def test_a_repository_that_cannot_be_read(
    url: str, reason: str, is_away: bool, tmp_path: Path
) -> None:
    dataset = GitDataset(url, tmp_path / "cache")
    with pytest.raises(SnapshotError, match=reason) as listed:
        dataset.head("refs/heads/main")
    with pytest.raises(SnapshotError, match=reason) as fetched:
        dataset.download("a" * 40)
    assert [isinstance(caught.value, HubAway) for caught in (listed, fetched)] == [is_away] * 2


@pytest.mark.parametrize(
    ("status", "is_away"), [(429, True), (500, True), (503, True), (403, False), (404, False)]
)
def test_a_server_that_answers_with_an_error(status: int, is_away: bool, tmp_path: Path) -> None:
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(status)

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        url = f"http://127.0.0.1:{server.server_port}/x.git"
        try:
            with pytest.raises(SnapshotError) as caught:
                GitDataset(url, tmp_path / "cache").head("refs/heads/main")
        finally:
            server.shutdown()
    assert isinstance(caught.value, HubAway) == is_away


def test_a_server_that_never_answers(remote: Path, tmp_path: Path) -> None:
    with pytest.raises(HubAway, match="git took longer than 0 s"):
        GitDataset(f"file://{remote}", tmp_path / "cache").head("refs/heads/main", seconds=0.0)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def test_an_outage_does_not_turn_a_delta_into_a_full_training(remote: Path, tmp_path: Path) -> None:
    seen, new = push(remote, "one"), push(remote, "other", "--amend")
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    dataset.download(new)
    # The new revision is in the cache. Only the fetch of the base revision meets the outage.
    dataset.dataset = "http://127.0.0.1:9/x.git"
    with pytest.raises(HubAway):
        take_snapshot(dataset, "refs/heads/main", new, seen_by_a_release(dataset.dataset, seen))


def test_a_full_disk_is_temporary_and_the_next_attempt_succeeds(
    remote: Path, tmp_path: Path, disk: Path
) -> None:
    base, sha = push(remote, "zero"), push(remote, os.urandom(100_000).hex())
    dataset = GitDataset(f"file://{remote}", disk / "cache")
    dataset.download(base)
    parent = seen_by_a_release(dataset.dataset, sha)
    for leave in (0, 40_000, 150_000):
        fill(disk, leave=leave)
        with pytest.raises(SnapshotError, match="could not be fetched") as caught:
            dataset.download(sha)
        assert is_temporary(caught.value)
        with pytest.raises(SnapshotError):
            take_snapshot(dataset, "refs/heads/main", base, parent)
    (disk / "filler").unlink()
    assert (dataset.download(sha).folder / "data/rows.jsonl").stat().st_size == 200_000


def test_what_is_not_in_it(remote: Path, tmp_path: Path) -> None:
    push(remote, "one")
    dataset = GitDataset(f"file://{remote}", tmp_path / "cache")
    with pytest.raises(SnapshotError, match="no such ref"):
        dataset.head("refs/heads/other")
    with pytest.raises(SnapshotError, match="no such revision"):
        dataset.download("a" * 40)
    assert not list((tmp_path / "cache").glob("revisions/*"))
