"""Uploads to the hub: the client of the Hugging Face Hub, with and without `hf_xet`, beside git.

The hub runs in this process, the client too; git is a program of its own. Each takes its turn with
files of its own, and ends when the commit is on the hub. Of git the whole way counts: `git add`,
`git commit` and `git push`, since the client has to read and hash the files as well.
"""

import os
import shutil
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from huggingface_hub import constants
from huggingface_hub.utils import _xet, disable_progress_bars

from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.timing import in_turns, seconds_of
from tests.hub_fixtures import RunningHub, running_hub


@dataclass(frozen=True, kw_only=True)
class Size:
    files: int
    """Small ones, of 400 bytes."""
    megabytes: int
    """Of one large file, in MiB."""
    repositories: int
    """Of a hub that starts."""
    rounds: int


FULL = Size(files=1000, megabytes=350, repositories=100, rounds=3)
SMALL = Size(files=20, megabytes=1, repositories=3, rounds=1)
TARGET, START_SECONDS = 1.5, 1.0


def measure(size: Size) -> Result:
    """Seconds of an upload beside those of git, and of the start of a hub."""
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as name, _own_cache(Path(name)):
        folder = Path(name)
        with running_hub(folder / "hub", max_push_bytes=2**32) as hub:
            uploads = Uploads(hub, folder)
            small = uploads.race(size.rounds, lambda to: write_small(to, size.files), lfs=False)
            large = uploads.race(size.rounds, lambda to: write_large(to, size.megabytes), lfs=True)
            for number in range(size.repositories):
                hub.api.create_repo(f"local/start-{number}", repo_type="dataset")

        def start() -> None:
            with running_hub(folder / "hub"):
                pass

        starts = [seconds_of(start) for _ in range(size.rounds)]
    return Result(
        figures=(
            *_figures(f"{size.files} small files", small, "git push"),
            *_figures(f"one file of {size.megabytes} MiB", large, "git lfs"),
            at_most(
                f"start and end of a hub with {size.repositories} repositories, without imports",
                statistics.median(starts),
                START_SECONDS,
                "s",
            ),
        ),
        bounded_by="sha256 and the write of the files, on both sides of the connection",
        detail={"small": small, "large": large, "starts": starts},
    )


def _figures(what: str, seconds: dict[str, list[float]], git: str) -> list[Figure]:
    figures: list[Figure] = []
    for way in ("plain HTTP", "hf_xet"):
        pairs = zip(seconds[way], seconds["git"], strict=True)
        ratio = statistics.median(ours / theirs for ours, theirs in pairs)
        figures.append(at_most(f"{what}: upload_folder by {way} / {git}", ratio, TARGET, "x"))
    median = {way: statistics.median(each) for way, each in seconds.items()}
    return [*figures, *(reported(f"{what}: {way}", median[way], "s") for way in median)]


class Uploads:
    def __init__(self, hub: RunningHub, folder: Path) -> None:
        self._hub = hub
        self._folder = folder
        self._number = 0

    def race(
        self, rounds: int, write: Callable[[Path], None], *, lfs: bool
    ) -> dict[str, list[float]]:
        """Seconds of each way, round by round."""
        return in_turns(
            rounds,
            {
                "plain HTTP": lambda: self._client(write, xet=False),
                "hf_xet": lambda: self._client(write, xet=True),
                "git": lambda: self._git(write, lfs=lfs),
            },
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
