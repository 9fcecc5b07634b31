"""Every call of the unmodified clients that writes, each with and without `hf_xet`.

docs/hub.md has the table of these calls. After each call git and git-lfs find nothing wrong with
the repository.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfFileSystem,
    constants,
)
from huggingface_hub.utils import _xet

from tests.hub_fixtures import RunningHub, running_hub

# What the client itself does when it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")

LARGE = bytes(range(256)) * 8_000
ROW = b'{"text": "a row"}\n'


@pytest.fixture(scope="module", params=["xet", "plain"])
def hub(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningHub]:
    folder = tmp_path_factory.mktemp(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_XET_CACHE", str(folder / "cache"))
        patch.setenv("HF_HOME", str(folder / "home"))
        patch.setattr(_xet, "_GLOBAL_XET_HOLDER", _xet.XetSessionHolder())
        patch.setattr(constants, "HF_HUB_DISABLE_XET", request.param == "plain")
        with running_hub(folder / "hub") as hub:
            yield hub


class Repo:
    def __init__(self, hub: RunningHub, name: str, scratch: Path) -> None:
        self.hub, self.api, self.scratch = hub, hub.api, scratch
        self.id = f"local/{name}"
        self.on: dict[str, Any] = {"repo_id": self.id, "repo_type": "dataset"}
        self.api.create_repo(self.id, repo_type="dataset")

    @property
    def folder(self) -> Path:
        return self.hub.root / "repos" / "datasets" / f"{self.id}.git"

    def read(self, path: str, revision: str = "main") -> bytes:
        url = f"/datasets/{self.id}/resolve/{revision}/{path}"
        return self.hub.request("GET", url).raise_for_status().content

    def paths(self) -> set[str]:
        return set(self.api.list_repo_files(**self.on)) - {".gitattributes"}

    def large(self) -> set[str]:
        found = self.api.list_repo_tree(**self.on, recursive=True)
        return {each.path for each in found if getattr(each, "lfs", None) is not None}

    def check(self) -> None:
        """By git and, in a clone that has all large files, by git-lfs."""
        git = ["git", f"--git-dir={self.folder}"]
        subprocess.run([*git, "fsck", "--strict", "--full"], check=True, capture_output=True)
        if shutil.which("git-lfs") is None:
            pytest.skip("git-lfs is not installed")
        clone = self.scratch / "clone"
        self.hub.git(
            *("-c", "filter.lfs.smudge=git-lfs smudge -- %f", "-c", "filter.lfs.required=true"),
            *("-c", "filter.lfs.process=git-lfs filter-process"),
            *("clone", "-q", f"{self.hub.url}/datasets/{self.id}", str(clone)),
            cwd=self.scratch,
        )
        self.hub.git("lfs", "fsck", cwd=clone)
        for path in self.large():
            assert (clone / path).read_bytes() == self.read(path)


@pytest.fixture
def repo(hub: RunningHub, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repo]:
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    repo = Repo(hub, name, tmp_path)
    yield repo
    repo.check()


def files(folder: Path, **contents: bytes) -> Path:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def test_upload_file(repo: Repo) -> None:
    path = files(repo.scratch / "in", a_parquet=LARGE) / "a.parquet"
    repo.api.upload_file(path_or_fileobj=path, path_in_repo="data/a.parquet", **repo.on)
    repo.api.upload_file(path_or_fileobj=ROW, path_in_repo="b.jsonl", **repo.on)
    with path.open("rb") as file:
        repo.api.upload_file(path_or_fileobj=file, path_in_repo="c.bin", **repo.on)
    # No line of `.gitattributes` names it, but git could not compare it with another version.
    repo.api.upload_file(path_or_fileobj=b"\0" * 5000, path_in_repo="odd name[1].dat", **repo.on)
    repo.api.upload_file(path_or_fileobj=b"", path_in_repo="empty.parquet", **repo.on)
    repo.api.upload_file(
        path_or_fileobj=b"12345678" * 1_500_000, path_in_repo="long.jsonl", **repo.on
    )
    assert repo.large() == {"data/a.parquet", "c.bin", "odd name[1].dat", "long.jsonl"}
    assert repo.read("data/a.parquet") == repo.read("c.bin") == LARGE
    assert (repo.read("b.jsonl"), repo.read("empty.parquet")) == (ROW, b"")
    future = repo.api.upload_file(
        path_or_fileobj=ROW, path_in_repo="d.jsonl", run_as_future=True, **repo.on
    )
    assert future.result().oid == repo.api.dataset_info(repo.id).sha


def test_the_first_upload_to_a_repository_of_the_settings(repo: Repo) -> None:
    """Such a repository has no commit, so that a first `git push` needs no pull."""
    empty = {**repo.on, "repo_id": f"{repo.id}-2"}
    repo.hub.create_dataset(empty["repo_id"])
    repo.api.upload_file(path_or_fileobj=LARGE, path_in_repo="a.parquet", **empty)
    commits = repo.api.list_repo_commits(**empty)
    assert [one.title for one in commits][1:] == ["initial commit"]


def test_upload_folder(repo: Repo) -> None:
    first = files(repo.scratch / "a", x_txt=b"1", old__y_bin=LARGE, old__z_log=b"", tmp__t=b"t")
    repo.api.upload_folder(folder_path=first, ignore_patterns=["tmp/*"], **repo.on)
    assert repo.paths() == {"x.txt", "old/y.bin", "old/z.log"}
    second = files(repo.scratch / "b", new_txt=b"2", x_txt=b"3")
    repo.api.upload_folder(
        folder_path=second, delete_patterns=["old/*"], commit_message="Renew", **repo.on
    )
    assert repo.paths() == {"x.txt", "new.txt"}
    assert repo.read("x.txt") == b"3"
    before = repo.api.dataset_info(repo.id).sha
    repo.api.upload_folder(folder_path=second, **repo.on)
    assert repo.api.dataset_info(repo.id).sha == before


def test_create_commit(repo: Repo) -> None:
    other = Repo(repo.hub, "create-commit-source", repo.scratch)
    other.api.upload_file(path_or_fileobj=LARGE, path_in_repo="far.bin", **other.on)
    other.api.upload_file(path_or_fileobj=ROW, path_in_repo="far.txt", **other.on)
    additions = [CommitOperationAdd("a.bin", LARGE + b"a"), CommitOperationAdd("a.txt", b"a")]
    repo.api.preupload_lfs_files(additions=additions, **repo.on)
    repo.api.create_commit(operations=additions, commit_message="Add", **repo.on)
    made = repo.api.create_commit(
        operations=[
            CommitOperationCopy("a.bin", "copies/a.bin"),
            CommitOperationCopy("a.txt", "copies/a.txt"),
            CommitOperationCopy(
                "far.bin", "far.bin", src_repo_id=other.id, src_repo_type="dataset"
            ),
            CommitOperationCopy(
                "far.txt", "far.txt", src_repo_id=other.id, src_repo_type="dataset"
            ),
            CommitOperationDelete("a.txt"),
        ],
        commit_message="Copy",
        **repo.on,
    )
    assert made.oid == repo.api.dataset_info(repo.id).sha
    assert repo.paths() == {"a.bin", "copies/a.bin", "copies/a.txt", "far.bin", "far.txt"}
    assert repo.read("copies/a.bin") == LARGE + b"a"
    assert (repo.read("far.bin"), repo.read("far.txt")) == (LARGE, ROW)


def test_delete(repo: Repo) -> None:
    folder = files(repo.scratch / "in", a_txt=b"a", b_txt=b"b", sub__c_bin=LARGE, sub__d=b"d")
    repo.api.upload_folder(folder_path=folder, **repo.on)
    repo.api.delete_file(path_in_repo="a.txt", **repo.on)
    repo.api.delete_folder(path_in_repo="sub", **repo.on)
    assert repo.paths() == {"b.txt"}
    repo.api.delete_files(delete_patterns=["*.txt"], **repo.on)
    assert repo.paths() == set()


def test_file_system(repo: Repo) -> None:
    fs = HfFileSystem(endpoint=repo.hub.url, token=repo.hub.token, skip_instance_cache=True)
    root = f"datasets/{repo.id}"
    with fs.open(f"{root}/a.txt", "w") as file:
        file.write("one\n")
    with fs.open(f"{root}/big.bin", "wb") as file:
        file.write(LARGE)
    path = files(repo.scratch / "in", put_txt=b"put") / "put.txt"
    fs.put(str(path), f"{root}/sub/put.txt")
    fs.cp_file(f"{root}/big.bin", f"{root}/sub/big.bin")
    fs.mv(f"{root}/a.txt", f"{root}/moved.txt")
    fs.rm(f"{root}/sub/put.txt")
    fs.invalidate_cache()
    assert repo.paths() == {"big.bin", "moved.txt", "sub/big.bin"}
    assert (repo.read("moved.txt"), repo.read("sub/big.bin")) == (b"one\n", LARGE)
    assert fs.modified(f"{root}/moved.txt") >= fs.modified(f"{root}/big.bin")


@pytest.mark.slow
def test_hf(repo: Repo) -> None:
    folder = files(repo.scratch / "in", a_txt=b"a", sub__b_bin=LARGE)
    env = repo.hub.git_env | {
        "HF_ENDPOINT": repo.hub.url,
        "HF_TOKEN": repo.hub.token,
        "HF_HOME": str(repo.scratch / "home"),
        "HF_HUB_DISABLE_XET": "1" if constants.HF_HUB_DISABLE_XET else "0",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }

    def hf(*arguments: str) -> str:
        program = Path(sys.executable).parent / "hf"
        return subprocess.run(
            [program, *arguments], env=env, check=True, capture_output=True, text=True
        ).stdout

    hf("upload", repo.id, str(folder), "data", "--repo-type", "dataset")
    hf("repos", "delete-files", repo.id, "data/a.txt", "--repo-type", "dataset")
    assert repo.paths() == {"data/sub/b.bin"}
    got = repo.scratch / "got"
    hf("download", repo.id, "--repo-type", "dataset", "--local-dir", str(got))
    assert (got / "data/sub/b.bin").read_bytes() == LARGE


@pytest.mark.slow
def test_push_to_hub(repo: Repo) -> None:
    repo.hub.create_dataset(f"{repo.id}-2")
    code = f"""
import os, json, datasets
from datasets import Dataset, DatasetDict, load_dataset
rows = lambda n, start=0: {{"text": [f"row {{i}}" for i in range(start, start + n)]}}
Dataset.from_dict(rows(300)).push_to_hub({repo.id!r}, num_shards=60)
Dataset.from_dict(rows(3)).push_to_hub({repo.id + "-2"!r})
DatasetDict(train=Dataset.from_dict(rows(20)), test=Dataset.from_dict(rows(5, 20))).push_to_hub(
    {repo.id!r}, config_name="small"
)
Dataset.from_dict(rows(310)).push_to_hub({repo.id!r}, num_shards=3)
found = load_dataset({repo.id!r})["train"]
small = load_dataset({repo.id!r}, "small")
stream = load_dataset({repo.id!r}, "small", split="test", streaming=True)
print(json.dumps([found.num_rows, found[309]["text"], small["test"].num_rows, list(stream)[-1]]))
"""
    env = repo.hub.git_env | {
        "HF_ENDPOINT": repo.hub.url,
        "HF_TOKEN": repo.hub.token,
        "HF_HOME": str(repo.scratch / "home"),
        "HF_HUB_DISABLE_XET": "1" if constants.HF_HUB_DISABLE_XET else "0",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told == [310, "row 309", 5, {"text": "row 24"}]
    shards = [path for path in repo.paths() if path.startswith("data/train-")]
    assert len(shards) == 3
    assert "small/test-00000-of-00001.parquet" in repo.large()


def test_git_lfs(repo: Repo) -> None:
    if shutil.which("git-lfs") is None:
        pytest.skip("git-lfs is not installed")
    hub, clone = repo.hub, repo.scratch / "work"
    hub.git("clone", "-q", f"{hub.url}/datasets/{repo.id}", str(clone), cwd=repo.scratch)
    hub.git("lfs", "install", "--local", cwd=clone)
    hub.git("lfs", "track", "*.dat", cwd=clone)
    files(clone, a_dat=LARGE, b_parquet=LARGE + b"b", c_txt=b"c")
    hub.git("add", "-A", cwd=clone)
    hub.git("commit", "-qm", "Large files", cwd=clone)
    hub.git("push", "-q", "origin", "main", cwd=clone)
    assert repo.large() == {"a.dat", "b.parquet"}
    assert (repo.read("a.dat"), repo.read("b.parquet")) == (LARGE, LARGE + b"b")
    # What git-lfs tracks in this repository, the client sends as a large file too.
    repo.api.upload_file(path_or_fileobj=b"plain text\n", path_in_repo="d.dat", **repo.on)
    assert "d.dat" in repo.large()
