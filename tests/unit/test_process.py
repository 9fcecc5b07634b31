"""Processes are told apart by their start time, and signals reach a whole session."""

import contextlib
import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jobs.process import (
    IS_LINUX,
    ProcessIdentity,
    identify,
    is_alive,
    kill_session,
    name_of,
    process_here,
    signal_session,
)

pytestmark = pytest.mark.skipif(not IS_LINUX, reason="/proc is Linux's")


def test_a_process_is_found_by_its_name_on_its_own_machine_alone() -> None:
    me = identify(os.getpid())
    assert me is not None
    assert process_here(name_of(me)) == me
    assert process_here(f"elsewhere {me.pid} {me.started}") is None
    assert process_here(name_of(ProcessIdentity(pid=me.pid, started="another boot+1"))) is None


def test_a_pid_that_is_anothers_now_is_left_alone() -> None:
    me = identify(os.getpid())
    assert me is not None
    other = ProcessIdentity(pid=me.pid, started=f"{me.started}1")
    assert not is_alive(other)
    kill_session(other)  # this very test would not survive a kill


def test_a_process_with_a_name_that_is_not_utf_8_is_found() -> None:
    code = (
        "import ctypes, sys; ctypes.CDLL(None).prctl(15, b'caf\\xc3) R'); print(flush=True);"
        " sys.stdin.read()"
    )
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as odd:
        assert odd.stdout is not None and odd.stdout.readline()
        assert identify(odd.pid) is not None


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
