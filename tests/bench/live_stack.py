"""A stack that is up, driven quickly: git without a new `pipeline env` each time, the job's own
files instead of the command's answers."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.stack_fixtures import Workplace, stack_up, workplace_in

POLL_SECONDS = 0.001
LIMIT_SECONDS = 600.0
IDENTITY = ("-c", "user.name=bench", "-c", "user.email=bench@example.invalid")


@dataclass(frozen=True, kw_only=True)
class Push:
    revision: str
    started: float
    """On `time.perf_counter`'s clock, like the next."""
    returned: float


@dataclass(frozen=True, kw_only=True)
class LiveStack:
    workplace: Workplace
    clone: Path
    git_env: Mapping[str, str]

    def push(self, files: Mapping[str, str]) -> Push:
        """Commit these files to main and push; only `git push` is timed."""
        for name, text in files.items():
            (self.clone / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "more")
        started = time.perf_counter()
        self.git("push", "--quiet", "origin", "HEAD:main")
        returned = time.perf_counter()
        revision = self.git("rev-parse", "HEAD").strip()
        return Push(revision=revision, started=started, returned=returned)

    def git(self, *arguments: str) -> str:
        command = ["git", *IDENTITY, *arguments]
        done = subprocess.run(
            command, cwd=self.clone, env=self.git_env, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr}\n{self.workplace.logs()}")
        return done.stdout

    def jobs(self) -> set[str]:
        return {folder.name for folder in (self.workplace.home / "jobs").glob("j[0-9]*")}

    def first_line(self, known: set[str]) -> tuple[Path, float]:
        """The folder of the job after all that are `known`, and when its log got its first line."""
        deadline = time.perf_counter() + LIMIT_SECONDS
        # Jobs count up. To list their folders again and again would cost more the more there are.
        last = max((int(name[1:]) for name in known if name[1:].isdigit()), default=0)
        folder = self.workplace.home / "jobs" / f"j{last + 1:06d}"
        while time.perf_counter() < deadline:
            if _size(folder / "log.txt"):
                return folder, time.perf_counter()
            time.sleep(POLL_SECONDS)
        raise RuntimeError(f"no job has written a line\n{self.workplace.logs()}")

    def outcome(self, folder: Path) -> tuple[dict[str, Any], float]:
        """What became of the job, and when."""
        deadline = time.perf_counter() + LIMIT_SECONDS
        while not _size(folder / "outcome.json"):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{folder.name} does not end\n{self.workplace.logs()}")
            time.sleep(POLL_SECONDS)
        found: dict[str, Any] = json.loads((folder / "outcome.json").read_bytes())
        return found, time.perf_counter()

    def learn(self, files: Mapping[str, str], expected: tuple[str, ...]) -> Path:
        """Push, and wait for the job's end; its folder."""
        known = self.jobs()
        self.push(files)
        folder, _ = self.first_line(known)
        outcome, _ = self.outcome(folder)
        if outcome["result"] not in expected:
            raise RuntimeError(f"the job ended as {outcome}\n{self.workplace.logs()}")
        return folder

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far of each service with all that it started and waited for."""
        record = json.loads((self.workplace.home / "stack.json").read_text())
        return {
            child["name"]: _cpu_seconds(child["process"]["pid"])
            for child in record["children"]
            if child["process"] is not None
        }


@contextmanager
def live_stack(folder: Path, **env: str) -> Iterator[LiveStack]:
    """The stack of a folder that has its `pipeline.toml`, up, and a clone of its dataset `facts`.

    A clone that is there already is kept. `env` goes over the settings.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = workplace_in(folder)
    workplace = Workplace(found.folder, {**found.env, **env})
    with stack_up(workplace):
        script = 'eval "$("$0" -m pipeline env)"; env -0'
        told = workplace.call(["bash", "-c", script, sys.executable])
        git_env = dict(each.split("=", 1) for each in told.split("\0") if each)
        stack = LiveStack(workplace=workplace, clone=folder / "clone", git_env=git_env)
        remote = f"{workplace.url('hub')}/datasets/local/facts"
        if stack.clone.exists():
            # The ports of this start are others.
            stack.git("remote", "set-url", "origin", remote)
            stack.git("fetch", "--quiet", "origin")
            stack.git("reset", "--quiet", "--hard", "origin/main")
        else:
            stack.clone.mkdir()
            stack.git("init", "--quiet", "--initial-branch=main")
            stack.git("remote", "add", "origin", remote)
        yield stack


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _cpu_seconds(pid: int) -> float:
    """utime, stime, cutime and cstime of proc(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
