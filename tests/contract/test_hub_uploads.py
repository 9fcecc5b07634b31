"""Every call of the unmodified clients that writes, each with and without `hf_xet`.

docs/hub.md has the table of these calls. After each call git and git-lfs find nothing wrong with
the repository.
"""

import json
import shutil
import subprocess
import sys

import pytest
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationCopy,
    CommitOperationDelete,
    HfFileSystem,
    constants,
)

from tests.hub_fixtures import recording_receiver
from tests.uploads_fixtures import LARGE, ROW, Repo, files, hub, repo

__all__ = ["hub", "repo"]

# What the client itself does when it sends a file without Xet.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.filterwarnings("ignore:It seems that you are about to commit a data file:UserWarning")
@pytest.mark.parametrize("repo", ["dataset", "model"], indirect=True)
def test_upload_file(repo: Repo) -> None:
    path = files(repo.scratch / "in", a_parquet=LARGE) / "a.parquet"
    repo.api.upload_file(path_or_fileobj=path, path_in_repo="data/a.parquet", **repo.on)
    repo.api.upload_file(path_or_fileobj=ROW, path_in_repo="b.jsonl", **repo.on)
    with path.open("rb") as file:
        repo.api.upload_file(path_or_fileobj=file, path_in_repo="c.bin", **repo.on)
    # No line of `.gitattributes` names it, but git could not compare it with another version.
    odd = "odd name[1]\u3000.dat"
    repo.api.upload_file(path_or_fileobj=b"\0" * 5000, path_in_repo=odd, **repo.on)
    repo.api.upload_file(path_or_fileobj=b"", path_in_repo="empty.parquet", **repo.on)
    repo.api.upload_file(
        path_or_fileobj=b"12345678" * 1_500_000, path_in_repo="long.jsonl", **repo.on
    )
    assert repo.large() == {"data/a.parquet", "c.bin", odd, "long.jsonl"}
    assert repo.read("data/a.parquet") == repo.read("c.bin") == LARGE
    assert (repo.read("b.jsonl"), repo.read("empty.parquet")) == (ROW, b"")
    future = repo.api.upload_file(
        path_or_fileobj=ROW, path_in_repo="d.jsonl", run_as_future=True, **repo.on
    )
    assert future.result().oid == repo.head


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
    before = repo.head
    repo.api.upload_folder(folder_path=second, **repo.on)
    assert repo.head == before


def test_upload_folder_of_many_files(repo: Repo) -> None:
    """With `hf_xet` the client makes a commit of each few hundred files."""
    folder = files(
        repo.scratch / "in", **{f"f{number}_txt": b"%d" % number for number in range(600)}
    )
    with recording_receiver() as receiver:
        watched = [{"type": "dataset", "name": repo.id}]
        webhook = repo.api.create_webhook(url=receiver.url, watched=watched)
        repo.api.upload_folder(folder_path=folder, commit_message="Many", **repo.on)
        head = repo.head
        repo.api.upload_folder(folder_path=folder, commit_message="Again", **repo.on)
        num_events = len(repo.hub.deliveries(webhook.id))
        repo.api.delete_webhook(webhook.id)
    titles = [one.title for one in repo.api.list_repo_commits(**repo.on)]
    made = titles[-2::-1]
    assert made == ["Many", *(f"Many (part {number})" for number in range(2, len(made) + 1))]
    assert (len(made) == 1) == constants.HF_HUB_DISABLE_XET
    assert num_events == len(made)
    assert repo.head == head
    assert repo.paths() == {f"f{number}.txt" for number in range(600)}
    assert repo.read("f599.txt") == b"599"


def test_create_commit(repo: Repo) -> None:
    other = Repo(repo.hub, "create-commit-source", repo.scratch)
    other.api.upload_file(path_or_fileobj=ROW, path_in_repo="far.txt", **other.on)
    additions = [CommitOperationAdd("a.bin", LARGE + b"a"), CommitOperationAdd("a.txt", b"a")]
    repo.api.preupload_lfs_files(additions=additions, **repo.on)
    added = repo.api.create_commit(operations=additions, commit_message="Add", **repo.on)
    made = repo.api.create_commit(
        operations=[
            CommitOperationCopy("a.bin", "copies/a.bin"),
            CommitOperationCopy("a.txt", "copies/a.txt"),
            CommitOperationCopy(
                "far.txt", "far.txt", src_repo_id=other.id, src_repo_type="dataset"
            ),
            CommitOperationDelete("a.txt"),
        ],
        commit_message="Copy",
        **repo.on,
    )
    assert made.oid == repo.head
    assert repo.paths() == {"a.bin", "copies/a.bin", "copies/a.txt", "far.txt"}
    assert repo.read("copies/a.bin") == LARGE + b"a"
    assert repo.read("far.txt") == ROW
    repo.api.upload_file(path_or_fileobj=LARGE + b"new", path_in_repo="a.bin", **repo.on)
    repo.api.create_commit(
        operations=[
            CommitOperationCopy(path, f"old/{path}", src_revision=added.oid)
            for path in ("a.bin", "a.txt")
        ],
        commit_message="Copy from an older commit",
        **repo.on,
    )
    assert (repo.read("old/a.bin"), repo.read("old/a.txt")) == (LARGE + b"a", b"a")


def test_delete(repo: Repo) -> None:
    folder = files(repo.scratch / "in", a_txt=b"a", b_txt=b"b", sub__c_bin=LARGE, sub__d=b"d")
    repo.api.upload_folder(folder_path=folder, **repo.on)
    repo.api.delete_file(path_in_repo="a.txt", **repo.on)
    repo.api.delete_folder(path_in_repo="sub", **repo.on)
    assert repo.paths() == {"b.txt"}
    repo.api.delete_files(delete_patterns=["*.txt"], **repo.on)
    assert repo.paths() == set()


def test_a_commit_that_deletes_gitattributes_lists_its_large_files(repo: Repo) -> None:
    repo.api.create_commit(
        operations=[
            CommitOperationAdd("data/.gitattributes", b"*.dat filter=lfs -text\n"),
            CommitOperationAdd("data/a.dat", LARGE),
        ],
        commit_message="Add",
        **repo.on,
    )
    repo.api.create_commit(
        operations=[
            CommitOperationDelete(".gitattributes"),
            CommitOperationDelete("data/"),
            CommitOperationAdd("a.parquet", LARGE),
            CommitOperationAdd("data/b.dat", LARGE + b"b"),
        ],
        commit_message="Renew",
        **repo.on,
    )
    lines = repo.read(".gitattributes").decode().splitlines()
    assert [line.split(" ")[0] for line in lines] == ["/a.parquet", "/data/b.dat"]


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
    got = repo.scratch / "got.bin"
    for expand in (False, True):
        fs = HfFileSystem(
            endpoint=repo.hub.url,
            token=repo.hub.token,
            expand_info=expand,
            skip_instance_cache=True,
        )
        fs.get_file(f"{root}/big.bin", str(got))
        assert got.read_bytes() == LARGE
        got.unlink()


@pytest.mark.slow
def test_hf(repo: Repo) -> None:
    folder = files(repo.scratch / "in", a_txt=b"a", sub__b_bin=LARGE)
    repo.hf("upload", repo.id, str(folder), "data", "--repo-type", "dataset")
    repo.hf("repos", "delete-files", repo.id, "data/a.txt", "--repo-type", "dataset")
    assert repo.paths() == {"data/sub/b.bin"}
    got = repo.scratch / "got"
    repo.hf("download", repo.id, "--repo-type", "dataset", "--local-dir", str(got))
    assert (got / "data/sub/b.bin").read_bytes() == LARGE
    repo.check_transport()


@pytest.mark.slow
def test_push_to_hub(repo: Repo) -> None:
    repo.hub.create_dataset(f"{repo.id}-2")
    code = f"""
import os, json, datasets
from datasets import Dataset, DatasetDict, load_dataset
from huggingface_hub import HfFileSystem
rows = lambda n, start=0: {{"text": [f"row {{i}}" for i in range(start, start + n)]}}
Dataset.from_dict(rows(300)).push_to_hub({repo.id!r}, num_shards=60)
first = load_dataset({repo.id!r})["train"]
num_shards = len(HfFileSystem().glob({f"datasets/{repo.id}/data/*.parquet"!r}))
print(json.dumps([num_shards, first.num_rows, first[299]["text"]]))
Dataset.from_dict(rows(3)).push_to_hub({repo.id + "-2"!r})
print(json.dumps(load_dataset({repo.id + "-2"!r})["train"].to_list()))
DatasetDict(train=Dataset.from_dict(rows(20)), test=Dataset.from_dict(rows(5, 20))).push_to_hub(
    {repo.id!r}, config_name="small"
)
Dataset.from_dict(rows(310)).push_to_hub({repo.id!r}, num_shards=3)
made = Dataset.from_dict(rows(7)).push_to_hub({repo.id!r}, create_pr=True)
asked = load_dataset({repo.id!r}, revision=made.pr_revision)["train"]
found = load_dataset({repo.id!r})["train"]
small = load_dataset({repo.id!r}, "small")
stream = load_dataset({repo.id!r}, "small", split="test", streaming=True)
print(json.dumps([found.num_rows, found[309]["text"], small["test"].num_rows, list(stream)[-1]]))
print(json.dumps([made.pr_num, asked.num_rows]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], env=repo.env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    first, other, told, asked = map(json.loads, done.stdout.splitlines()[-4:])
    assert first == [60, 300, "row 299"]
    assert other == [{"text": f"row {number}"} for number in range(3)]
    assert told == [310, "row 309", 5, {"text": "row 24"}]
    assert asked == [1, 7]
    shards = [path for path in repo.paths() if path.startswith("data/train-")]
    assert len(shards) == 3
    assert "small/test-00000-of-00001.parquet" in repo.large()
    repo.check_transport()


def test_git_lfs(repo: Repo) -> None:
    push_with_git_lfs(repo, a_dat=LARGE, b_parquet=LARGE + b"b", c_txt=b"c")
    assert repo.large() == {"a.dat", "b.parquet"}
    assert (repo.read("a.dat"), repo.read("b.parquet")) == (LARGE, LARGE + b"b")
    # What git-lfs tracks in this repository, the client sends as a large file too.
    repo.api.upload_file(path_or_fileobj=b"plain text\n", path_in_repo="d.dat", **repo.on)
    assert "d.dat" in repo.large()


def push_with_git_lfs(repo: Repo, **contents: bytes) -> None:
    """git-lfs tracks `*.dat` then."""
    if shutil.which("git-lfs") is None:
        pytest.skip("git-lfs is not installed")
    hub, clone = repo.hub, repo.scratch / "work"
    hub.git("clone", "-q", f"{hub.url}/{repo.path}", str(clone), cwd=repo.scratch)
    hub.git("lfs", "install", "--local", cwd=clone)
    hub.git("lfs", "track", "*.dat", cwd=clone)
    files(clone, **contents)
    hub.git("add", "-A", cwd=clone)
    hub.git("commit", "-qm", "Large files", cwd=clone)
    hub.git("push", "-q", "origin", "main", cwd=clone)
