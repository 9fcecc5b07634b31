"""The real `git lfs` against the hub, and what it pushed as the other clients read it."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import HfHubHTTPError

from pipeline.formats import Pointer
from pipeline.hub.large_files import LargeFiles
from tests.hub_fixtures import RunningHub, commit_file, push_file, running_hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningHub]:
    if shutil.which("git-lfs") is None:
        pytest.skip("there is no git-lfs on this machine")
    with running_hub(tmp_path_factory.mktemp("lfs") / "hub", reconcile_seconds=3600) as hub:
        yield hub


def new_clone(hub: RunningHub, folder: Path, name: str) -> Path:
    hub.git("clone", "-q", hub.create_dataset(name), "work", cwd=folder)
    worktree = folder / "work"
    hub.git("lfs", "install", "--local", cwd=worktree)
    hub.git("lfs", "track", "*.bin", "*.jsonl", cwd=worktree)
    return worktree


def test_locks_are_not_there_and_keep_no_push_out(hub: RunningHub, tmp_path: Path) -> None:
    worktree = new_clone(hub, tmp_path, "local/locked")
    (worktree / "a.bin").write_bytes(b"a")
    commit_file(hub, worktree, "note.txt", "one")
    assert "locksverify" not in hub.git("push", "origin", "HEAD:main", cwd=worktree)
    commit_file(hub, worktree, "note.txt", "two")
    hub.git("config", "lfs.locksverify", "true", cwd=worktree)
    hub.git("push", "-q", "origin", "HEAD:main", cwd=worktree)
    said = hub.git("lfs", "lock", "a.bin", cwd=worktree, check=False)
    assert "not supported by this hub" in said


def test_listings_tell_the_large_files(hub: RunningHub, tmp_path: Path) -> None:
    content = os.urandom(3_000_000)
    oid, size = hashlib.sha256(content).hexdigest(), len(content)
    worktree = new_clone(hub, tmp_path, "local/facts")
    (worktree / "noise.bin").write_bytes(content)
    push_file(hub, worktree, "README.md", "# Facts, of which one is large\n")
    listed = hub.api.list_repo_tree("local/facts", repo_type="dataset", recursive=True)
    files = {item.path: item for item in listed if hasattr(item, "size")}
    [same] = hub.api.get_paths_info("local/facts", ["noise.bin"], repo_type="dataset")
    for file in (files["noise.bin"], same):
        assert file.size == file.lfs.size == size
        assert file.lfs.sha256 == oid
        pointer = Pointer(oid=oid, size=size).render()
        assert file.lfs.pointer_size == len(pointer)
        assert file.blob_id == hashlib.sha1(b"blob %d\0" % len(pointer) + pointer).hexdigest()
    assert files["README.md"].lfs is None
    siblings = hub.api.dataset_info("local/facts", files_metadata=True).siblings
    [noise] = [each for each in siblings or [] if each.rfilename == "noise.bin"]
    assert noise.size == noise.lfs.size == size
    assert noise.lfs.sha256 == oid


def test_a_large_file_that_never_came_is_told(hub: RunningHub, tmp_path: Path) -> None:
    hub.create_dataset("local/hollow")
    hub.git("init", "-q", "work", cwd=tmp_path)
    pointer = Pointer(oid="0" * 64, size=7)
    worktree = tmp_path / "work"
    commit_file(hub, worktree, "a.bin", pointer.render().decode())
    hub.git("push", "-q", f"{hub.url}/datasets/local/hollow", "HEAD:main", cwd=worktree)
    for method in ("HEAD", "GET"):
        answer = hub.request(method, "/datasets/local/hollow/resolve/main/a.bin")
        assert answer.status_code == 404
        assert "push it from a clone" in answer.headers["x-error-message"]
        assert "x-error-code" not in answer.headers
    with pytest.raises((HfHubHTTPError, OSError)) as caught:
        hf_hub_download(
            "local/hollow",
            "a.bin",
            repo_type="dataset",
            endpoint=hub.url,
            token=hub.token,
            cache_dir=tmp_path / "cache",
        )
    told = [caught.value, caught.value.__cause__]
    assert any("push it from a clone" in str(each) for each in told)
    # When it comes later, nobody has noted that it does not exist.
    content = b"content"
    file = LargeFiles(hub.folder("local/hollow")).path("0" * 64)
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    answer = hub.request("GET", "/datasets/local/hollow/resolve/main/a.bin")
    assert answer.content == content
