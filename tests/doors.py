"""Counts the doors: how many project files one push, job, swap and completion go through.

`python -m tests.doors` starts a whole stack with a small model, and prints, for each of the four,
the count and the files in the order in which they were entered. A file counts if a function in it
was called. What runs while a module is imported does not count.
"""

import json
import mmap
import os
import sqlite3
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parents[1]
PACKAGES = ("jobs", "pipeline", "receiver", "serving")
FOLDER_VARIABLE = "DOORS_FOLDER"

OFF, PUSH, JOB, COMPLETION = range(4)
"""What the stack is doing now. All processes read it from one shared byte."""

ROLES = ("hub", "receiver", "serve", "runner", "up")
"""Commands of the stack. A process that is none of these runs a job."""

DOORS: dict[str, tuple[set[str], set[int]]] = {
    "one push, up to the job's row": ({"hub", "receiver"}, {PUSH}),
    "one retraining job": ({"runner", "job"}, {PUSH, JOB}),
    "one swap": ({"serve"}, {PUSH, JOB}),
    "one completion": ({"serve"}, {COMPLETION}),
}
"""For each count: the roles of the processes, and what the stack is doing. The runner may lease the
job while the push still waits for its answer, so the job and its swap count from the push on."""


def record_calls(folder: Path) -> None:
    """Write each project file that this process enters to a file in `folder`, once per phase."""
    with (folder / "phase").open("rb") as file:
        phase = mmap.mmap(file.fileno(), 1, access=mmap.ACCESS_READ)
    seen: set[tuple[int, str]] = set()
    # A forked job has a record of its own.
    os.register_at_fork(after_in_child=seen.clear)
    prefixes = tuple(f"{ROOT / package}/" for package in PACKAGES)

    def on_event(frame: FrameType, event: str, _argument: object) -> None:
        now, path = phase[0], frame.f_code.co_filename
        if event != "call" or now == OFF or (now, path) in seen:
            return
        if not path.startswith(prefixes) or _is_importing(frame):
            return
        seen.add((now, path))
        role = next((role for role in ROLES if role in getattr(sys, "argv", ())), "job")
        name = Path(path).relative_to(ROOT)
        with (folder / f"{os.getpid()}.calls").open("a") as calls:
            calls.write(f"{time.monotonic():.6f} {now} {role} {name}\n")

    threading.setprofile(on_event)
    sys.setprofile(on_event)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def count_doors() -> dict[str, list[str]]:
    """Run the loop once, and give the files of each count in the order of entry."""
    from tests.stack_fixtures import clone, configure, facts, stack_up, workplace_in

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        calls_dir = folder / "doors"
        calls_dir.mkdir()
        (calls_dir / "phase").write_bytes(bytes([OFF]))
        (calls_dir / "sitecustomize.py").write_text(
            "import os, pathlib, tests.doors\n"
            f"tests.doors.record_calls(pathlib.Path(os.environ[{FOLDER_VARIABLE!r}]))\n"
        )
        workplace = workplace_in(folder)
        configure(workplace)
        recorded = replace(
            workplace,
            env={
                **workplace.env,
                FOLDER_VARIABLE: str(calls_dir),
                "PYTHONPATH": f"{calls_dir}{os.pathsep}{ROOT}",
            },
        )
        with stack_up(recorded), _phase_of(calls_dir) as enter:
            checkout = clone(workplace)
            _expect_promoted(workplace.wait_for_job(checkout.push({"a.jsonl": facts(0, 40)})))
            complete = _completion(workplace.url("serving"))
            complete()  # leaves out what happens in the first request only

            enter(COMPLETION)
            complete()
            enter(PUSH)
            revision = checkout.push({"b.jsonl": facts(40, 60)})
            _wait_until(lambda: _is_delivered(workplace.home))
            enter(JOB)
            _expect_promoted(workplace.wait_for_job(revision))
            enter(OFF)
        lines = [
            line.split(" ")
            for file in calls_dir.glob("*.calls")
            for line in file.read_text().splitlines()
        ]
    lines.sort(key=lambda line: float(line[0]))
    return {
        what: list(
            dict.fromkeys(
                path for _, phase, role, path in lines if role in roles and int(phase) in phases
            )
        )
        for what, (roles, phases) in DOORS.items()
    }


@contextmanager
def _phase_of(folder: Path) -> Iterator[Callable[[int], None]]:
    with (folder / "phase").open("r+b") as file, mmap.mmap(file.fileno(), 1) as phase:

        def enter(now: int) -> None:
            phase[0] = now

        yield enter


def _completion(server: str) -> Callable[[], None]:
    body = {"model": "facts", "prompt": "Shelf 7 holds", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )

    def complete() -> None:
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["choices"]

    return complete


def _is_delivered(home: Path) -> bool:
    """Whether the hub has stored that the receiver answered, which it does after the job's row."""
    with sqlite3.connect(f"file:{next(home.glob('hub/*.sqlite'))}?mode=ro", uri=True) as database:
        query = "SELECT count(*) FROM deliveries WHERE status = 'pending'"
        return bool(database.execute(query).fetchone() == (0,))


def _expect_promoted(job: dict[str, dict[str, str]]) -> None:
    assert job["outcome"]["result"] == "promoted", job["outcome"]


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "the push was not delivered"
        time.sleep(0.01)


if __name__ == "__main__":
    for what, files in count_doors().items():
        print(f"{what}: {len(files)} files")
        for path in files:
            print(f"  {path}")
