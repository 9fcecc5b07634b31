"""A hub that takes uploads with and without `hf_xet`, and a new repository in it for each test."""

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub._commit_api import _upload_files
from huggingface_hub.utils import _xet

from pipeline.hub.large_files import LargeFiles
from tests.hub_fixtures import RunningHub, running_hub

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
    def __init__(self, hub: RunningHub, name: str, scratch: Path, type: str = "dataset") -> None:
        self.hub, self.api, self.scratch = hub, hub.api, scratch
        self.id = f"local/{name}"
        self.on: dict[str, Any] = {"repo_id": self.id, "repo_type": type}
        self.api.create_repo(**self.on)
        self.folder = hub.folder(self.id, type)
        self.path = self.id if type == "model" else f"{type}s/{self.id}"

    @property
    def env(self) -> dict[str, str]:
        """Of a program that uses the clients."""
        return self.hub.git_env | {
            "HF_ENDPOINT": self.hub.url,
            "HF_TOKEN": self.hub.token,
            "HF_HOME": str(self.scratch / "home"),
            "HF_HUB_DISABLE_XET": "1" if constants.HF_HUB_DISABLE_XET else "0",
            "HF_HUB_DISABLE_UPDATE_CHECK": "1",
            "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        }

    def hf(self, *arguments: str) -> str:
        """What the command `hf` prints."""
        program = Path(sys.executable).parent / "hf"
        done = subprocess.run([program, *arguments], env=self.env, capture_output=True, text=True)
        assert done.returncode == 0, f"hf {' '.join(arguments)}:\n{done.stdout}{done.stderr}"
        return done.stdout

    @property
    def head(self) -> str:
        sha = self.api.repo_info(**self.on).sha
        assert sha is not None
        return sha

    def read(self, path: str, revision: str = "main") -> bytes:
        url = f"/{self.path}/resolve/{quote(revision, safe='')}/{path}"
        return self.hub.request("GET", url).raise_for_status().content

    def paths(self, revision: str = "main") -> set[str]:
        found = self.api.list_repo_files(**self.on, revision=revision)
        return set(found) - {".gitattributes"}

    def large(self, revision: str = "main") -> set[str]:
        found = self.api.list_repo_tree(**self.on, revision=revision, recursive=True)
        return {each.path for each in found if getattr(each, "lfs", None) is not None}

    def check_transport(self) -> None:
        """That large files came through Xet, or none if it is switched off."""
        came = list((self.folder / "lfs" / "xet").glob("*/*"))
        assert bool(came) == (not constants.HF_HUB_DISABLE_XET)

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
            *("clone", "-q", f"{self.hub.url}/{self.path}", str(clone)),
            cwd=self.scratch,
        )
        self.hub.git("lfs", "fsck", cwd=clone)
        for path in self.large():
            assert (clone / path).read_bytes() == self.read(path)


@pytest.fixture
def repo(hub: RunningHub, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Repo]:
    """A dataset, or what the test names as the parameter."""
    name = request.node.originalname.removeprefix("test_").replace("_", "-")
    repo = Repo(hub, name, tmp_path, getattr(request, "param", "dataset"))
    yield repo
    repo.check()


def files(folder: Path, **contents: bytes) -> Path:
    for name, content in contents.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@pytest.fixture
def name(hub: RunningHub, request: pytest.FixtureRequest) -> str:
    """A dataset of this test's own."""
    name = f"local/{hashlib.sha256(request.node.name.encode()).hexdigest()[:12]}"
    hub.create_dataset(name)
    return name


def files_of(hub: RunningHub, name: str) -> LargeFiles:
    return LargeFiles(hub.folder(name))


def upload_large_files(hub: RunningHub, name: str, *contents: Any) -> None:
    """As `create_commit` does before it makes the commit."""
    additions = [
        CommitOperationAdd(path_in_repo=f"{number}.bin", path_or_fileobj=content)
        for number, content in enumerate(contents)
    ]
    _upload_files(
        additions=additions,
        repo_type="dataset",
        repo_id=name,
        headers={"authorization": f"Bearer {hub.token}"},
        endpoint=hub.url,
        revision="main",
    )
