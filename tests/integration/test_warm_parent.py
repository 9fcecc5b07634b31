"""The warm parent that jobs are forked from: its end, its return, and doing without it."""

import errno
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs.errors import LaunchError
from jobs.launcher import Status
from tests.jobs_fixtures import until
from tests.local_launcher_fixtures import Bench


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
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")
    assert warm.ended(warm.start("show_process", attempt=2)).exit_code == 0
    assert json.loads(warm.log.read_text().splitlines()[-1])["warm"] is True


def test_a_request_that_died_with_the_warm_parent_is_sent_again(warm: Bench) -> None:
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")
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


def test_a_first_warm_parent_that_cannot_be_started_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    bench = Bench(tmp_path, ("json",))
    monkeypatch.undo()
    handle = bench.start("show_process")
    assert bench.ended(handle).exit_code == 0
    assert json.loads(bench.log.read_text())["warm"] is False
    bench.close()


def test_a_folder_in_which_the_warm_parent_cannot_write_its_log_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "warm.log").mkdir()
    with pytest.raises(IsADirectoryError):
        Bench(tmp_path, ("json",))


def test_a_warm_parent_that_cannot_be_started_again_is_done_without(
    warm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")
    os.kill(warm_pid(warm), signal.SIGSTOP)
    handle = warm.start("show_process")
    parent = warm.launcher._warm
    assert parent is not None
    monkeypatch.setattr(parent, "_command", ["/no/such/program"])
    os.kill(warm_pid(warm), signal.SIGKILL)
    assert warm.ended(handle).exit_code == 0
    assert json.loads(warm.log.read_text())["warm"] is False
    assert parent.state == "off"


def test_a_cold_start_that_failed_is_not_made_up_for_later(
    warm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("jobs.launchers.local.subprocess.Popen", refuse)
    with pytest.raises(LaunchError, match="no more processes"):
        warm.launcher.start(warm.launch(command=("true",)))
    monkeypatch.undo()
    warm.launcher.poll_processes()
    assert warm.launcher.poll("local:j000001:1").phase == "vanished"


def test_a_start_that_the_system_refuses_is_lost_alone(
    warm: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")
    os.kill(warm_pid(warm), signal.SIGSTOP)
    handle = warm.start("show_process")

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refused)
    os.kill(warm_pid(warm), signal.SIGKILL)
    until(lambda: warm.launcher.poll_processes() or warm.launcher.poll(handle).phase == "vanished")


def test_the_warm_parent_ends_when_its_runner_is_killed(warm: Bench) -> None:
    until(lambda: warm.launcher.poll_processes() or warm.launcher._warm.state == "ready")
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
