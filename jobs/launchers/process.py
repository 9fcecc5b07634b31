"""Which process is meant: a pid alone may by now be another's. Standard library only."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

IS_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl if IS_LINUX else None
"""Settings of a process of its own, see prctl(2)."""
_AUTOGROUP_ATTEMPTS = 5


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    pid: int
    started: str
    """Start time as the system tells it, with the boot that it counts from."""


@dataclass(frozen=True)
class _Stat:
    state: str
    session: int
    start_ticks: str


def identify(pid: int) -> ProcessIdentity | None:
    """None where no such process lives; one that has ended and waits to be reaped does not."""
    if not IS_LINUX:
        return _identify_by_ps(pid)
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessIdentity(pid=pid, started=f"{_boot_id()}+{stat.start_ticks}")


def is_alive(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def signal_session(leader: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to all processes of the session that `leader` began, without itself.

    The leader records how the others ended. Where it is dead already, the others get the signal
    all the same. Elsewhere than on Linux the signal goes to the leader's process group.
    """
    present = identify(leader.pid)
    if present is not None and present != leader:
        return  # the pid is another's, which the kernel allows only when the session is empty
    if not IS_LINUX:
        if present is not None:
            os.killpg(leader.pid, number)
        return
    if not leader.started.startswith(_boot_id()):
        return
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == leader.pid:
            continue
        stat = _stat(int(entry.name))
        if stat is not None and stat.session == leader.pid and stat.state not in "ZX":
            try:
                os.kill(int(entry.name), number)
            except ProcessLookupError:
                continue


def end_with(parent: int) -> None:
    """Let the kernel end this process as soon as `parent`, which started it, is gone; where it is
    gone already, end now. A no-op elsewhere than on Linux."""
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


def be_nice(niceness: int) -> None:
    """Let this process, and what it starts in its session, step back behind those of niceness 0;
    never forward.

    Where Linux groups processes by session to share the processors out ("autogroup", sched(7)), a
    nice value counts among those of one session only, and the session has one of its own.
    """
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    session = Path("/proc/self/autogroup")  # missing or empty where processes are not grouped
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            found = session.read_text().split()
            if found and int(found[-1]) < niceness:
                session.write_text(str(niceness))
        except BlockingIOError:
            # Who is not root may write ten times a second, all processes together.
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def _stat(pid: int) -> _Stat | None:
    """Fields of /proc/<pid>/stat, see proc(5); the name in brackets may hold anything."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = line.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), start_ticks=fields[19])


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identify_by_ps(pid: int) -> ProcessIdentity | None:
    answer = subprocess.run(
        ["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True, text=True, check=False
    )
    state, _, started = answer.stdout.strip().partition(" ")
    if not state or state.startswith("Z"):
        return None
    return ProcessIdentity(pid=pid, started=started.strip())
