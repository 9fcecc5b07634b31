"""The local launcher with real processes and signals, forked from the warm parent and cold."""

import contextlib
import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.folder import COMPUTING, EXIT, LOCK, OUTCOME, PROCESS
from jobs.launcher import Status
from jobs.launchers.process import IS_LINUX, identify, signal_session
from tests.jobs_fixtures import is_gone, until
from tests.local_launcher_fixtures import ENVIRONMENT, Bench


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
            launcher.poll_processes()
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


def test_only_the_next_attempt_removes_the_outcome_of_the_first(bench: Bench) -> None:
    outcome = bench.job_dir / OUTCOME
    bench.ended(bench.start("write_outcome", "promoted", "1"))
    other = bench.another()
    assert bench.ended(other.start(bench.launch("die"))).exit_code == 1
    assert outcome.exists(), "the same attempt was not started again"
    other.close()
    bench.ended(bench.start("die", attempt=2))
    assert not outcome.exists()


def test_the_next_attempt_waits_until_the_first_is_gone(bench: Bench) -> None:
    with (bench.job_dir / LOCK).open("w") as lock:
        fcntl.lockf(lock, fcntl.LOCK_EX)
        handle = bench.start("show_process", attempt=2)

        def has_begun() -> bool:
            bench.launcher.poll_processes()
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


@pytest.mark.skipif(not IS_LINUX, reason="/proc is Linux's")
def test_a_process_with_a_name_that_is_not_utf_8_is_found() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'caf\\xc3) R'); print(flush=True);"
        " sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None and odd.stdout.readline()
        assert identify(odd.pid) is not None


@pytest.mark.skipif(not IS_LINUX, reason="/proc is Linux's")
def test_a_process_that_the_system_hides_is_none_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def read_all_but_one(path: Path, **options: Any) -> str:
        if path == Path("/proc/1/stat"):
            raise PermissionError(errno.EPERM, "Operation not permitted")
        return read_text(path, **options)

    command = ["sh", "-c", "sleep 600 & echo; wait"]
    with subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None and shell.stdout.readline()
        leader = identify(shell.pid)
        assert leader is not None
        monkeypatch.setattr(Path, "read_text", read_all_but_one)
        try:
            assert identify(1) is None
            signal_session(leader, signal.SIGKILL)
            assert shell.wait(30) == 0, "the leader, which gets no signal, waited for the other one"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(leader.pid, signal.SIGKILL)


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
