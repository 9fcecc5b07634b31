"""The local launcher with real processes and signals, forked from the warm parent and cold."""

import fcntl
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.folder import COMPUTING, EXIT, LOCK, LOG, PROCESS, read_record
from jobs.launcher import Launch, Status
from jobs.launchers.local import LocalLauncher
from tests.jobs_fixtures import is_gone, pids_in, until

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


class Bench:
    """A launcher and the folder of one job."""

    def __init__(self, jobs_dir: Path, preload: tuple[str, ...]) -> None:
        self.jobs_dir = jobs_dir
        self.preload = preload
        self.launcher = self.another()
        self.job_dir = jobs_dir / "j000001"
        self.job_dir.mkdir()
        self.log = self.job_dir / LOG
        self.handles: list[str] = []

    def another(self) -> LocalLauncher:
        return LocalLauncher(self.jobs_dir, preload=self.preload, environment=ENVIRONMENT)

    def launch(self, *arguments: str, attempt: int = 1, **changes: Any) -> Launch:
        values = {
            "job_id": "j000001",
            "attempt": attempt,
            "command": (sys.executable, "-m", "tests.jobs_program", *arguments),
            "env": ENVIRONMENT,
            "job_dir": self.job_dir,
            "niceness": 10,
        }
        return Launch(**{**values, **changes})

    def start(self, *arguments: str, attempt: int = 1, **changes: Any) -> str:
        handle = self.launcher.start(self.launch(*arguments, attempt=attempt, **changes))
        self.handles.append(handle)
        return handle

    def ended(self, handle: str) -> Status:
        def ask() -> Status | None:
            self.launcher.tend()
            status = self.launcher.poll(handle)
            return status if status.phase in ("exited", "vanished") else None

        status = until(ask)
        assert status is not None
        return status

    def running(self, handle: str) -> None:
        def ask() -> bool:
            self.launcher.tend()
            return self.launcher.poll(handle).phase == "running"

        until(ask)

    def pids(self, count: int) -> list[int]:
        """Those that the job wrote to its log."""
        return pids_in(self.log, count, meanwhile=self.launcher.tend)

    def leader(self) -> int:
        record = read_record(self.job_dir / PROCESS)
        assert record is not None
        return int(record["pid"])

    def close(self) -> None:
        for handle in self.handles:
            self.launcher.stop(handle, force=True)
            self.ended(handle)
        self.launcher.close()


@pytest.fixture(params=["warm", "cold"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, ("json",) if request.param == "warm" else ())
    yield bench
    bench.close()


def test_a_command_runs_as_its_own_process_in_its_folder(bench: Bench) -> None:
    handle = bench.start("show_process", "-x", "a b", niceness=12)
    assert bench.ended(handle) == Status(phase="exited", exit_code=0)
    shown = json.loads(bench.log.read_text())
    assert shown == {
        "argv": ["show_process", "-x", "a b"],
        "cwd": str(bench.job_dir),
        "name": "__main__",
        "niceness": 12,
        "niceness of the session": 12 if Path("/proc/self/autogroup").exists() else None,
        "stdin": "",
        "leads_session": False,
        "warm": bool(bench.preload),
    }


def test_only_the_given_variables_reach_the_command(bench: Bench) -> None:
    handle = bench.start("show_environment", env={**ENVIRONMENT, "GREETING": "grüße\n"})
    bench.ended(handle)
    shown = json.loads(bench.log.read_text())
    assert shown["GREETING"] == "grüße\n"
    assert shown.keys() - {"LC_CTYPE"} == ENVIRONMENT.keys() | {"GREETING"}


@pytest.mark.parametrize("code", [0, 1, 42])
def test_the_exit_code_is_told(bench: Bench, code: int) -> None:
    handle = bench.start("write_outcome", "promoted", str(code))
    assert bench.ended(handle) == Status(phase="exited", exit_code=code)


def test_a_program_that_is_not_python_is_started_too(bench: Bench) -> None:
    handle = bench.start(command=("sh", "-c", "echo out; echo err >&2; exit 7"))
    assert bench.ended(handle).exit_code == 7
    assert bench.log.read_text().split() == ["out", "err"]


@pytest.mark.parametrize(
    ("command", "code"),
    [(("no-such-program",), 127), (("/",), 126), (("echo", "x" * 200_000), 126)],
)
def test_a_program_that_cannot_be_started_says_why(
    bench: Bench, command: tuple[str, ...], code: int
) -> None:
    status = bench.ended(bench.start(command=command))
    assert status.exit_code == code
    assert status.error is not None and status.error.startswith(command[0])
    assert "could not be started" in bench.log.read_text()


def test_an_error_is_in_the_log(bench: Bench) -> None:
    status = bench.ended(bench.start("write_outcome", "promoted", "not a number"))
    assert status.exit_code == 1
    assert "ValueError: invalid literal" in bench.log.read_text()


def test_a_second_start_finds_the_first(bench: Bench) -> None:
    handle = bench.start("sleep_until_stopped")
    bench.pids(1)
    assert bench.start("sleep_until_stopped") == handle
    other = bench.another()
    assert other.start(bench.launch("sleep_until_stopped")) == handle
    assert other.poll(handle).phase == "running"
    other.stop(handle, force=False)
    assert bench.ended(handle) == Status(phase="exited", exit_code=-signal.SIGTERM)
    assert len(bench.pids(1)) == 1
    other.close()


def test_two_launchers_that_start_at_once_start_one_process(bench: Bench) -> None:
    others = [bench.another() for _ in range(3)]
    handle = bench.start("sleep_until_stopped")
    for other in others:
        other.start(bench.launch("sleep_until_stopped"))

    def all_settled() -> bool:
        for launcher in (bench.launcher, *others):
            launcher.tend()
        return all(
            launcher.poll(handle).phase == "running" for launcher in (bench.launcher, *others)
        )

    until(all_settled)
    bench.pids(1)
    bench.launcher.stop(handle, force=False)
    bench.ended(handle)
    assert len(bench.pids(1)) == 1
    for other in others:
        other.close()


def test_the_next_attempt_waits_for_no_trace_of_the_first(bench: Bench) -> None:
    first = bench.start("die")
    assert bench.ended(first) == Status(phase="exited", exit_code=-signal.SIGKILL)
    second = bench.start("show_process", attempt=2)
    assert bench.ended(second).exit_code == 0
    assert bench.launcher.poll(first).phase == "vanished", "the folder is the second one's now"


def test_the_next_attempt_waits_until_the_first_is_gone(bench: Bench) -> None:
    with (bench.job_dir / LOCK).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        handle = bench.start("show_process", attempt=2)

        def has_begun() -> bool:
            bench.launcher.tend()
            return bench.log.exists()

        until(has_begun)
    assert bench.ended(handle).exit_code == 0


def test_a_stop_reaches_every_process(bench: Bench) -> None:
    handle = bench.start("have_children")
    pids = bench.pids(3)
    bench.launcher.stop(handle, force=False)
    assert bench.ended(handle).exit_code == -signal.SIGTERM
    until(lambda: all(is_gone(pid) for pid in pids))


def test_a_command_that_ignores_the_stop_is_killed(bench: Bench) -> None:
    handle = bench.start("ignore_stop")
    (pid,) = bench.pids(1)
    bench.launcher.stop(handle, force=False)
    assert not is_gone(pid)
    bench.launcher.stop(handle, force=True)
    assert bench.ended(handle).exit_code == -signal.SIGKILL
    assert is_gone(pid)


def test_a_server_can_tell_that_a_job_computes_until_nobody_does(bench: Bench) -> None:
    lock = bench.jobs_dir / COMPUTING

    def is_held() -> bool:
        with lock.open("a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    handle = bench.start("sleep_until_stopped")
    bench.pids(1)
    assert is_held()
    os.kill(bench.leader(), signal.SIGKILL)
    assert bench.ended(handle).phase == "vanished"
    until(lambda: not is_held())


def test_what_a_command_leaves_behind_ends_with_it(bench: Bench) -> None:
    handle = bench.start("leave_children")
    assert bench.ended(handle).exit_code == 0
    (pid,) = bench.pids(1)
    until(lambda: is_gone(pid))


def test_a_killed_command_is_told_with_its_signal(bench: Bench) -> None:
    handle = bench.start("sleep_until_stopped")
    os.kill(bench.pids(1)[0], signal.SIGKILL)
    assert bench.ended(handle) == Status(phase="exited", exit_code=-signal.SIGKILL)


def test_the_command_dies_with_the_process_that_would_record_its_end(bench: Bench) -> None:
    handle = bench.start("have_children")
    pids = bench.pids(3)
    os.kill(bench.leader(), signal.SIGKILL)
    assert bench.ended(handle).phase == "vanished"
    until(lambda: is_gone(pids[-1]))
    bench.launcher.stop(handle, force=True)
    # One left the session while nobody was there to take it back.
    in_session = [pid for pid in pids if not is_gone(pid)]
    until(lambda: sum(not is_gone(pid) for pid in pids) <= 1)
    for pid in in_session:
        if not is_gone(pid):
            os.kill(pid, signal.SIGKILL)


def test_the_exit_code_outlives_the_launcher(bench: Bench) -> None:
    handle = bench.start("wait_for", "go", "5")
    bench.pids(1)
    bench.launcher.close()
    (bench.job_dir / "go").touch()
    until(lambda: (bench.job_dir / EXIT).exists())
    bench.launcher = bench.another()
    assert bench.launcher.poll(handle) == Status(phase="exited", exit_code=5)


def test_a_pid_that_is_anothers_now_is_not_the_job(bench: Bench) -> None:
    handle = "local:j000001:1"
    record = {"attempt": 1, "pid": os.getpid(), "started": "another boot+1"}
    (bench.job_dir / PROCESS).write_text(json.dumps(record))
    assert bench.launcher.poll(handle).phase == "vanished"
    bench.launcher.stop(handle, force=True)  # this very test would not survive a kill


@pytest.mark.parametrize("content", ["", "{", "\0" * 40])
def test_a_record_that_a_power_cut_emptied_counts_for_nothing(bench: Bench, content: str) -> None:
    (bench.job_dir / PROCESS).write_text(content)
    (bench.job_dir / EXIT).write_text(content)
    assert bench.launcher.poll("local:j000001:1").phase == "vanished"
    assert bench.ended(bench.start("show_process")).exit_code == 0


def test_the_log_is_read_from_an_offset(bench: Bench) -> None:
    assert bench.launcher.logs("local:j000001:1", 0) == b""
    handle = bench.start(command=("echo", "one two"))
    bench.ended(handle)
    assert bench.launcher.logs(handle, 4) == b"two\n"


def warm_pid(bench: Bench) -> int:
    warm = bench.launcher._warm
    assert warm is not None and warm._process is not None
    return warm._process.pid


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path, ("json",))
    yield bench
    bench.close()


def test_a_killed_warm_parent_takes_no_job_with_it_and_comes_back(warm: Bench) -> None:
    first = warm.start("wait_for", "go", "5")
    warm.pids(1)
    os.kill(warm_pid(warm), signal.SIGKILL)
    (warm.job_dir / "go").touch()
    assert warm.ended(first) == Status(phase="exited", exit_code=5)
    until(lambda: warm.launcher.tend() or warm.launcher._warm.state == "ready")
    assert warm.ended(warm.start("show_process", attempt=2)).exit_code == 0
    assert json.loads(warm.log.read_text().splitlines()[-1])["warm"] is True


def test_a_request_that_died_with_the_warm_parent_is_sent_again(warm: Bench) -> None:
    until(lambda: warm.launcher.tend() or warm.launcher._warm.state == "ready")
    os.kill(warm_pid(warm), signal.SIGSTOP)
    handle = warm.start("show_process")
    os.kill(warm_pid(warm), signal.SIGKILL)
    assert warm.ended(handle).exit_code == 0
    assert len(warm.log.read_text().splitlines()) == 1


def test_a_stop_while_the_job_waits_for_the_warm_parent(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ("tests.jobs_slow_module",))
    handle = bench.start("sleep_until_stopped")
    assert bench.launcher.poll(handle).phase == "starting"
    bench.launcher.stop(handle, force=False)
    assert bench.launcher.poll(handle).phase == "vanished"
    bench.close()
    assert not bench.log.exists()


@pytest.mark.parametrize("module", ["no_such_module", "tests.jobs_threaded_module"])
def test_without_a_usable_warm_parent_jobs_start_cold(tmp_path: Path, module: str) -> None:
    bench = Bench(tmp_path, (module,))
    handle = bench.start("show_process")
    assert bench.ended(handle).exit_code == 0
    assert json.loads(bench.log.read_text())["warm"] is False
    bench.close()


def test_the_warm_parent_ends_when_its_runner_is_killed(warm: Bench) -> None:
    until(lambda: warm.launcher.tend() or warm.launcher._warm.state == "ready")
    process = warm.launcher._warm._process
    assert process is not None and process.stdin is not None
    process.stdin.close()  # what the kernel does for a killed runner
    assert process.wait(timeout=30) == 0


@pytest.mark.slow
def test_a_fork_of_a_parent_with_torch_uses_many_threads(tmp_path: Path) -> None:
    bench = Bench(tmp_path, ("torch",))
    handle = bench.start("use_torch", "2")
    assert bench.ended(handle) == Status(phase="exited", exit_code=0)
    assert bench.log.read_text() == f"sum {512**3} preloaded True\n"
    bench.close()
