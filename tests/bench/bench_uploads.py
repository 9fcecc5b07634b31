"""Uploads to the hub: the client of the Hugging Face Hub, with and without `hf_xet`, beside git.

The hub runs in this process, the client too; git and `push_to_hub` are programs of their own. Each
way of an upload takes its turn with files of its own, and ends when the commit is on the hub. Of
git the whole way counts: `git add`, `git commit` and `git push`, since the client has to read and
hash the files as well.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.utils import _xet, disable_progress_bars

from tests.bench.hub_at_work import push_to_hub, start_of_process
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.timing import in_turns, seconds_of
from tests.hub_fixtures import RunningHub, running_hub


@dataclass(frozen=True, kw_only=True)
class Size:
    files: int
    """Small ones, of 400 bytes."""
    megabytes: int
    """Of one large file, in MiB."""
    commit_files: int
    """Of one commit through the API."""
    rows: int
    """Of one `push_to_hub`."""
    repositories: int
    """Of a hub that starts."""
    rounds: int


FULL = Size(
    files=1000, megabytes=350, commit_files=10_000, rows=100_000, repositories=100, rounds=3
)
SMALL = Size(files=20, megabytes=1, commit_files=50, rows=100, repositories=3, rounds=1)
RATIO, START_SECONDS, COMMIT_SECONDS, QUEUED_SECONDS = 1.5, 1.0, 10.0, 2.0
GIT_PUSH, GIT_LFS = "git push", "git lfs"
CLIENT = ("plain HTTP", "hf_xet")


def measure(size: Size) -> Result:
    """Seconds of uploads beside those of git, of a large commit, from `push_to_hub` to its job, and
    of the start of a hub."""
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name, _own_cache(Path(name)):
        folder = Path(name)
        with running_hub(folder / "hub", max_push_bytes=2**32) as hub:
            uploads = Uploads(hub, folder)
            small = uploads.race(size.rounds, lambda to: write_small(to, size.files), GIT_PUSH)
            large = uploads.race(
                size.rounds, lambda to: write_large(to, size.megabytes), GIT_LFS, GIT_PUSH
            )
            commits = [uploads.commit(size.commit_files) for _ in range(size.rounds)]
            pushed, queued = push_to_hub(hub, folder, size.rows)
            for number in range(size.repositories):
                hub.api.create_repo(f"local/start-{number}", repo_type="dataset")

        def start() -> None:
            with running_hub(folder / "hub"):
                pass

        starts = in_turns(
            size.rounds,
            {
                "without imports": lambda: seconds_of(start),
                "`pipeline hub`": lambda: start_of_process(folder),
            },
        )
    start_of_a_hub = f"start of a hub with {size.repositories} repositories"
    rows = f"`push_to_hub` of {size.rows} rows"
    return Result(
        figures=(
            *_figures(f"{size.files} small files", small),
            *_figures(f"one file of {size.megabytes} MiB", large),
            at_most(
                f"a commit of {size.commit_files} files through the API",
                statistics.median(commits),
                COMMIT_SECONDS,
                "s",
            ),
            reported(rows, pushed, "s"),
            at_most(f"{rows}: its return → the job is queued", queued, QUEUED_SECONDS, "s"),
            *(
                at_most(f"{start_of_a_hub}, {how}", statistics.median(each), START_SECONDS, "s")
                for how, each in starts.items()
            ),
        ),
        bounded_by="sha256 and the write of the files, on both sides of the connection",
        detail={"small": small, "large": large, "commits": commits, "starts": starts},
    )


def _figures(what: str, seconds: dict[str, list[float]]) -> list[Figure]:
    figures: list[Figure] = []
    for git in (way for way in seconds if way not in CLIENT):
        for way in CLIENT:
            pairs = zip(seconds[way], seconds[git], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            figures.append(at_most(f"{what}: upload_folder by {way} / {git}", ratio, RATIO, "x"))
    median = {way: statistics.median(each) for way, each in seconds.items()}
    return [*figures, *(reported(f"{what}: {way}", median[way], "s") for way in median)]


class Uploads:
    def __init__(self, hub: RunningHub, folder: Path) -> None:
        self._hub = hub
        self._folder = folder
        self._number = 0

    def race(
        self, rounds: int, write: Callable[[Path], None], *gits: str
    ) -> dict[str, list[float]]:
        """Seconds of each way, round by round."""
        ways: dict[str, Callable[[], float]] = {
            way: lambda way=way: self._client(write, xet=way == "hf_xet")  # type: ignore[misc]
            for way in CLIENT
        }
        for git in gits:
            ways[git] = lambda git=git: self._git(write, lfs=git == GIT_LFS)  # type: ignore[misc]
        return in_turns(rounds, ways)

    def commit(self, num_files: int) -> float:
        """Seconds of one commit of so many new files through the API."""
        self._number += 1
        name = f"local/d{self._number}"
        self._hub.api.create_repo(name, repo_type="dataset")
        files = [
            CommitOperationAdd(f"{number // 100}/{number}.txt", b"%d" % number)
            for number in range(num_files)
        ]
        return seconds_of(
            lambda: self._hub.api.create_commit(
                name, files, commit_message="Files", repo_type="dataset"
            )
        )

    def _files(self, write: Callable[[Path], None]) -> tuple[str, Path]:
        self._number += 1
        files = self._folder / f"files-{self._number}"
        files.mkdir()
        write(files)
        return f"local/d{self._number}", files

    def _client(self, write: Callable[[Path], None], *, xet: bool) -> float:
        name, files = self._files(write)
        self._hub.api.create_repo(name, repo_type="dataset")
        with mock.patch.object(constants, "HF_HUB_DISABLE_XET", not xet):
            seconds = seconds_of(
                lambda: self._hub.api.upload_folder(
                    folder_path=files, repo_id=name, repo_type="dataset"
                )
            )
        shutil.rmtree(files)
        return seconds

    def _git(self, write: Callable[[Path], None], *, lfs: bool) -> float:
        name, files = self._files(write)
        url = self._hub.create_dataset(name)
        commands = [("add", "-A"), ("commit", "-qm", "Files"), ("push", "-q", url, "HEAD:main")]
        self._hub.git("init", "-q", cwd=files)
        if lfs:
            self._hub.git("lfs", "install", "--local", cwd=files)
            self._hub.git("lfs", "track", "*.bin", cwd=files)

        def push() -> None:
            for command in commands:
                self._hub.git(*command, cwd=files)

        seconds = seconds_of(push)
        shutil.rmtree(files)
        return seconds


def write_small(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number}.txt").write_text(f"{os.urandom(8).hex()} row {number}\n" * 16)


def write_large(folder: Path, megabytes: int) -> None:
    with (folder / "large.bin").open("wb") as file:
        for _ in range(megabytes):
            file.write(os.urandom(1024 * 1024))


def _own_cache(folder: Path) -> mock._patch_dict:
    """`hf_xet` must not find what an earlier run has sent."""
    _xet._GLOBAL_XET_HOLDER = _xet.XetSessionHolder()
    caches = {"HF_XET_CACHE": str(folder / "xet"), "HF_HOME": str(folder / "home")}
    return mock.patch.dict(os.environ, caches)


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
