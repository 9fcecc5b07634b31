"""A whole stack in a temporary folder, on free ports, started and stopped by the command."""

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_ports

PORTS = ("HUB", "RECEIVER", "SERVING")


@dataclass(frozen=True)
class Workplace:
    """A folder with a `pipeline.toml` and the environment that its commands run in."""

    folder: Path
    env: Mapping[str, str]

    def run(self, *arguments: str, code: int = 0, timeout: float = 240) -> str:
        """The `pipeline` command; its standard output."""
        return self.call([sys.executable, "-m", "pipeline", *arguments], code, timeout)

    def json(self, *arguments: str, code: int = 0) -> Any:
        return json.loads(self.run(*arguments, "--json", code=code))

    def call(
        self,
        command: list[str],
        code: int = 0,
        timeout: float = 240,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> str:
        process = subprocess.Popen(
            command,
            cwd=cwd or self.folder,
            env=env or self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            # Not killed at once: it ends what it has started.
            process.terminate()
            output, errors = process.communicate(timeout=60)
            pytest.fail(f"{command}: after {timeout:g} s\n{output}\n{errors}\n{self.logs()}")
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, f"{command}\n{output}\n{errors}\n{self.logs()}"
        return output

    def ask_for_env(self) -> dict[str, str]:
        """The environment that `pipeline env` gives a user."""
        script = 'eval "$("$0" -m pipeline env)"; exec env -0'
        said = self.call(["bash", "-c", script, sys.executable])
        return dict(line.split("=", 1) for line in said.split("\0") if line)

    @cached_property
    def users_env(self) -> dict[str, str]:
        """The same, asked for once."""
        return self.ask_for_env()

    def git(self, *arguments: str, cwd: Path) -> str:
        who = ("-c", "user.name=tester", "-c", "user.email=tester@example.invalid")
        return self.call(["git", *who, *arguments], cwd=cwd, env=self.users_env)

    def wait_for_job(self, revision: str, timeout: float = 600) -> Any:
        """The job that answers for a commit, once it has ended, whatever its outcome."""
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "jobs", "wait", "--commit", revision, "--json"],
            env=self.env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert done.stdout, f"no job for {revision}: {done.stderr}\n{self.logs()}"
        return json.loads(done.stdout)

    def url(self, service: str) -> str:
        return f"http://127.0.0.1:{self.env[f'PIPELINE_{service.upper()}__PORT']}"

    @property
    def home(self) -> Path:
        return Path(self.env["PIPELINE_HOME"])

    def logs(self) -> str:
        """The end of every log, for the message of a test that failed."""
        return "\n".join(
            f"--- {file}\n" + "\n".join(file.read_text(errors="replace").splitlines()[-20:])
            for file in sorted(self.home.glob("logs/*.log"))
            + sorted(self.home.glob("jobs/*/log.txt"))
        )


def configure(workplace: Workplace, name: str = "facts", **train: object) -> None:
    """Write settings with one pipeline that learns little and fast, unless told otherwise."""
    quick: dict[str, object] = {"max_tokens": 6_000, "max_length": 64}
    lines = [
        "[[pipelines]]",
        f'name = "{name}"',
        f'dataset = "local/{name}"',
        "debounce_seconds = 0",
        "[pipelines.train]",
        *(f"{key} = {json.dumps(value)}" for key, value in (quick | train).items()),
        "[pipelines.gate]",
        "min_learned = 0",
    ]
    (workplace.folder / "pipeline.toml").write_text("\n".join(lines) + "\n")


def findings(workplace: Workplace, code: int = 1) -> dict[str, str]:
    """What is wrong, by check."""
    found = workplace.json("doctor", code=code)
    assert all(finding["next_step"] for finding in found)
    return {each["check"]: each["message"] for each in found}


def facts(start: int, stop: int, answer: str = "box") -> str:
    """Rows of a small dataset."""
    return "".join(
        json.dumps({"prompt": f"Shelf {n} holds", "completion": f" {answer} {n * 7 % 10}."}) + "\n"
        for n in range(start, stop)
    )


@dataclass(frozen=True)
class Checkout:
    """A clone of a dataset on the workplace's hub."""

    workplace: Workplace
    folder: Path

    def push(self, files: Mapping[str, str], *git_push: str) -> str:
        """Commit these files, push to main, and give the revision."""
        for name, text in files.items():
            (self.folder / name).write_text(text)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "more rows")
        self.git("push", "--quiet", *git_push, "origin", "HEAD:main")
        return self.git("rev-parse", "HEAD").strip()

    def git(self, *arguments: str) -> str:
        return self.workplace.git(*arguments, cwd=self.folder)


def clone(workplace: Workplace, name: str = "facts") -> Checkout:
    folder = workplace.folder / name
    remote = f"{workplace.url('hub')}/datasets/local/{name}"
    workplace.git("clone", "--quiet", remote, str(folder), cwd=workplace.folder)
    return Checkout(workplace, folder)


def workplace_in(folder: Path) -> Workplace:
    *ports, metrics_port = free_ports(len(PORTS) + 1)
    named = zip(PORTS, ports, strict=True)
    env = dict(os.environ) | {f"PIPELINE_{name}__PORT": str(port) for name, port in named}
    env |= {
        "PIPELINE_JOBS__METRICS_PORT": str(metrics_port),
        # Tests run beside each other: two threads that wait for each other on busy cores are slower
        # than one.
        "PIPELINE_JOBS__NUM_THREADS": "1",
        # Otherwise a job hardly computes while another test does.
        "PIPELINE_JOBS__NICENESS": "0",
        "PIPELINE_HOME": str(folder / ".pipeline"),
        "PIPELINE_SETTINGS": str(folder / "pipeline.toml"),
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return Workplace(folder, env)


def end_with_this_process() -> None:
    """For `preexec_fn`: a test that is killed leaves no stack behind, on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


@contextmanager
def stack_up(workplace: Workplace, *options: str) -> Iterator[Workplace]:
    """The stack, up with these options. It ends with the test's process, however that ends."""
    log = workplace.home / "logs" / "up.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as stream:
        up = subprocess.Popen(
            [sys.executable, "-m", "pipeline", "up", *options],
            cwd=workplace.folder,
            env=workplace.env,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            preexec_fn=end_with_this_process,
        )
    try:
        deadline = time.monotonic() + 120
        while not _is_ready(workplace, up.pid):
            assert up.poll() is None, f"the stack did not start\n{workplace.logs()}"
            assert time.monotonic() < deadline, f"the stack is not ready\n{workplace.logs()}"
            time.sleep(0.05)
        yield workplace
    finally:
        up.terminate()
        up.wait(90)


def _is_ready(workplace: Workplace, pid: int) -> bool:
    try:
        record = json.loads((workplace.home / "stack.json").read_text())
    except FileNotFoundError:
        return False
    return bool(record["is_ready"] and record["process"]["pid"] == pid)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return workplace_in(tmp_path)
