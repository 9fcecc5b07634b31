"""Identifies processes, sends signals to them, and sets their priority. Uses only the standard
library.

A process is identified by its pid and its start time, because the system may give the pid of an
ended process to a new process.
"""

import contextlib
import ctypes
import functools
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

IS_LINUX = sys.platform == "linux"

_PR_SET_PDEATHSIG = 1
prctl = ctypes.CDLL(None).prctl if IS_LINUX else None
"""The system call prctl(2), which changes settings of this process. None on systems other than
Linux."""
_AUTOGROUP_ATTEMPTS = 5
_KILL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    pid: int
    started: str
    """The start time, in a format that depends on the system. On Linux, this text begins with the
    id of the machine's boot, because Linux counts the start time from the boot."""


@dataclass(frozen=True)
class _Stat:
    state: str
    session: int
    start_ticks: str


def identify(pid: int) -> ProcessIdentity | None:
    """The identity of the process with this pid. None if there is no such process, or if the
    process is a zombie: it has ended, and only its exit code is left."""
    if not IS_LINUX:
        return _identify_by_ps(pid)
    stat = _stat(pid)
    if stat is None or stat.state in "ZX":
        return None
    return ProcessIdentity(pid=pid, started=f"{_boot_id()}+{stat.start_ticks}")


def num_killed_for_memory() -> int:
    """How many processes the kernel has killed since it started because memory ran out, that of
    the machine or of a container. 0 if it does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def is_alive(process: ProcessIdentity) -> bool:
    return identify(process.pid) == process


def is_suspended(process: ProcessIdentity) -> bool:
    """Whether the process is alive, but suspended (SIGSTOP or Ctrl-Z). On systems other than Linux,
    always False."""
    if not IS_LINUX or not is_alive(process):
        return False
    stat = _stat(process.pid)
    return stat is not None and stat.state == "T"


def name_of(process: ProcessIdentity) -> str:
    """A text that names the process and its machine. `process_here` reads it."""
    return f"{socket.gethostname()} {process.pid} {process.started}"


def process_here(name: str) -> ProcessIdentity | None:
    """The process that `name_of` has named. None if it is a process of another machine, or of this
    machine before its last boot."""
    host, pid, started = name.split(" ", 2)
    if host != socket.gethostname() or (IS_LINUX and not started.startswith(_boot_id())):
        return None
    return ProcessIdentity(pid=int(pid), started=started)


def signal_session(leader: ProcessIdentity, number: signal.Signals) -> None:
    """Send a signal to all processes of the session that `leader` leads, except the leader. If the
    leader is dead, the other processes still get the signal (only on Linux).

    On systems other than Linux, the signal goes to the processes of the leader's process group.
    These include the leader, which must ignore SIGTERM.
    """
    if not IS_LINUX and is_alive(leader):
        os.killpg(leader.pid, number)
    for pid in _others_in_session(leader):
        send_signal(pid, number)


def kill_session(leader: ProcessIdentity) -> None:
    """Kill the leader of a session and all other processes of the session, and wait until they are
    gone, but only for a moment: a process that waits for a disk may need longer."""
    give_up = time.monotonic() + _KILL_SECONDS
    if is_alive(leader):
        send_signal(leader.pid, signal.SIGKILL)
    while (others := _others_in_session(leader)) or is_alive(leader):
        for pid in others:
            send_signal(pid, signal.SIGKILL)
        if time.monotonic() > give_up:
            return
        time.sleep(0.005)


def _others_in_session(leader: ProcessIdentity) -> list[int]:
    """The processes of the session except its leader. Empty on systems other than Linux."""
    if not IS_LINUX or identify(leader.pid) not in (None, leader):
        # If another process has this pid now, the session has no process left: only then does the
        # kernel give the pid away.
        return []
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [
        pid
        for pid in pids
        if pid != leader.pid
        and (stat := _stat(pid)) is not None
        and stat.session == leader.pid
        and stat.state not in "ZX"
    ]


def send_signal(pid: int, number: signal.Signals) -> None:
    """Send a signal, unless the process has ended or belongs to another user, for example after
    `sudo`."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def die_with_parent(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Make the kernel send the signal `number` to this process when its parent process `parent`, or
    the parent's thread that has started this process, ends. If the parent has already ended, end
    this process now. Does nothing on systems other than Linux."""
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, number)
        if os.getppid() != parent:
            os._exit(1)


def lower_priority(niceness: int) -> None:
    """Raise the nice value of this process and of its session to `niceness`. A higher nice value
    means a lower priority. A nice value that is already higher stays as it is.

    Linux can share the processor time among sessions instead of processes ("autogroup", sched(7)).
    The nice value of a process then counts only within its session, so the session's own nice value
    must be raised too.
    """
    niceness = max(niceness, os.getpriority(os.PRIO_PROCESS, 0))
    os.setpriority(os.PRIO_PROCESS, 0, niceness)
    session = Path("/proc/self/autogroup")  # missing or empty if Linux does not group processes
    for _ in range(_AUTOGROUP_ATTEMPTS):
        try:
            found = session.read_text().split()
            if found and int(found[-1]) < niceness:
                session.write_text(str(niceness))
        except BlockingIOError:
            # Try again later. Linux limits how often files of this kind are written: all processes
            # without root rights share a limit of ten writes per second.
            time.sleep(0.1)
        except OSError:
            return
        else:
            return


def _stat(pid: int) -> _Stat | None:
    """Some fields of the file /proc/<pid>/stat (see proc(5)). None if there is no such process, or
    if the system hides it: with the mount option `hidepid`, a user cannot read about processes of
    other users. Without root rights, this process could not send signals to them either.

    The file shows the program's name in brackets. The name itself may contain spaces and brackets,
    so this function counts the fields from the last closing bracket.
    """
    try:
        # The name may contain any bytes. The kernel also cuts it, perhaps in the middle of a
        # character. So replace the bytes that cannot be decoded.
        line = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    fields = line.rpartition(")")[2].split()
    return _Stat(state=fields[0], session=int(fields[3]), start_ticks=fields[19])


@functools.cache
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
