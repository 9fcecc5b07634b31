"""From `git push` returned to the first line of the job's log: with preloaded modules and without.

Two real stacks without a debounce are up at once, and take turns. The commits change no row, so
that jobs end at once; what is measured is over before they notice.
"""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.timing import in_turns
from tests.stack_fixtures import Workplace, configure, facts, stack_up, workplace_in


@dataclass(frozen=True, kw_only=True)
class Size:
    pushes: int


FULL, SMALL = Size(pushes=20), Size(pushes=2)
TARGET_SECONDS = 0.3
LIMIT_SECONDS = 600.0


def measure(size: Size) -> Result:
    """From `git push` returned to the first line of the job's log."""
    with tempfile.TemporaryDirectory() as name:
        folders = {each: Path(name) / each for each in ("warm", "cold")}
        for folder in folders.values():
            folder.mkdir()
            configure(workplace_in(folder), max_tokens=2_000)
        with (
            _stack(folders["warm"]) as warm,
            _stack(folders["cold"], PIPELINE_JOBS__PRELOAD="[]") as cold,
        ):
            for stack in (warm, cold):
                stack.push({"facts.jsonl": facts(0, 60)})
            found = in_turns(
                size.pushes, {"warm": lambda: _note(warm), "cold": lambda: _note(cold)}
            )
    return Result(
        figures=(
            at_most(
                f"push returned → first line, median of {size.pushes}",
                statistics.median(found["warm"]),
                TARGET_SECONDS,
                "s",
            ),
            reported("the slowest of them", max(found["warm"]), "s"),
            reported(
                "without preloaded modules (`preload = []`), median",
                statistics.median(found["cold"]),
                "s",
            ),
        ),
        bounded_by="the hub's delivery, the receiver's transaction, the runner's poll (50 ms), and "
        "a fork that has the modules; without `preload`, the job imports them",
        detail={name: list(seconds) for name, seconds in found.items()},
    )


def _note(stack: "_Stack") -> float:
    return stack.push({"README.md": f"Written at {time.time()}.\n"})


@dataclass(frozen=True, kw_only=True)
class _Stack:
    """A stack that is up. What it does is seen in the files of its jobs, which are quicker than
    the answers of the commands."""

    workplace: Workplace
    clone: Path

    def push(self, files: Mapping[str, str]) -> float:
        """Commit these files to main, push, and wait for the end of the job; the seconds from
        `git push` returned to the first line of its log."""
        jobs = self.workplace.home / "jobs"
        known = [int(folder.name[1:]) for folder in jobs.glob("j[0-9]*")]
        job = jobs / f"j{max(known, default=0) + 1:06d}"
        for name, text in files.items():
            (self.clone / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "more")
        self.git("push", "--quiet", "origin", "HEAD:main")
        returned = time.perf_counter()
        self._await_content(job / "log.txt")
        first_line = time.perf_counter()
        self._await_content(job / "outcome.json")
        return first_line - returned

    def git(self, *arguments: str) -> None:
        self.workplace.git(*arguments, cwd=self.clone)

    def _await_content(self, file: Path) -> None:
        deadline = time.perf_counter() + LIMIT_SECONDS
        while not (file.exists() and file.stat().st_size):
            if time.perf_counter() > deadline:
                raise RuntimeError(f"{file} stays empty\n{self.workplace.logs()}")
            time.sleep(0.001)


@contextmanager
def _stack(folder: Path, **env: str) -> Iterator[_Stack]:
    """The stack of a folder that has its `pipeline.toml`. `env` goes over the settings."""
    found = workplace_in(folder)
    workplace = Workplace(found.folder, {**found.env, **env})
    with stack_up(workplace):
        stack = _Stack(workplace=workplace, clone=folder / "clone")
        stack.clone.mkdir()
        stack.git("init", "--quiet", "--initial-branch=main")
        stack.git("remote", "add", "origin", f"{workplace.url('hub')}/datasets/local/facts")
        yield stack


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
