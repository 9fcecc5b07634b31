"""What the tests' jobs run: `python -m tests.jobs_program ACTION [ARGUMENT…]` in a job folder."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def say(text: str) -> None:
    # One write: lines of several processes in one log must not run into each other.
    os.write(1, f"{text}\n".encode())


def fail_with_open_files() -> None:
    files = [open(str(number), "w") for number in range(4)]  # noqa: SIM115
    raise ValueError(f"{len(files)} files are open")


def sleep_until_stopped() -> None:
    say(f"pid {os.getpid()}")
    time.sleep(600)


def ignore_stop() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep_until_stopped()


def stop_politely(result: str) -> None:
    def leave(*_: object) -> None:
        Path("outcome.json").write_text(json.dumps({"result": result, "stage": "train"}))
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    sleep_until_stopped()


def have_children() -> None:
    """A child, a grandchild, and one that left the session."""
    shell = subprocess.Popen(
        ["sh", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True
    )
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    gone = subprocess.Popen(sleep, start_new_session=True)
    say(f"pid {grandchild}\npid {gone.pid}")
    sleep_until_stopped()


def use_multiprocessing() -> None:
    child = multiprocessing.Process(target=sleep_until_stopped)
    child.start()
    say(f"parent {os.getpid() == int(Path(f'/proc/{child.pid}/stat').read_text().split()[3])}")
    child.join()


def leave_children() -> None:
    gone = subprocess.Popen(["sleep", "600"], start_new_session=True)
    say(f"pid {gone.pid}")


def write_outcome(result: str, exit_code: str) -> None:
    Path("outcome.json").write_text(json.dumps({"result": result, "release": "r000001-1f3ac9d2"}))
    sys.exit(int(exit_code))


def die_once() -> None:
    """Killed in the first attempt; the second one finds what the first one wrote."""
    record = Path("snapshot.json")
    if record.exists():
        say("second attempt")
        write_outcome("promoted", "0")
    record.write_text("{}")
    os.kill(os.getpid(), signal.SIGKILL)


def fail_for_now(num_failures: str) -> None:
    """Fails so many times for a cause that can pass, and then succeeds."""
    say("attempt")
    if Path("log.txt").read_text().count("attempt\n") > int(num_failures):
        write_outcome("promoted", "0")
    outcome = {"result": "failed", "stage": "snapshot", "reason": "The hub is away."}
    Path("outcome.json").write_text(json.dumps(outcome | {"may_pass": True}))
    sys.exit(1)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(path: str, exit_code: str) -> None:
    say(f"pid {os.getpid()}")
    while not Path(path).exists():
        time.sleep(0.01)
    sys.exit(int(exit_code))


def work_a_moment() -> None:
    time.sleep(0.3)
    write_outcome("promoted", "0")


def show_environment() -> None:
    say(json.dumps(dict(os.environ)))


def use_torch(num_threads: str) -> None:
    is_preloaded = "torch" in sys.modules
    import torch

    torch.set_num_threads(int(num_threads))
    product = torch.ones(512, 512) @ torch.ones(512, 512)
    assert torch.get_num_threads() == int(num_threads)
    say(f"sum {product.sum().item():.0f} preloaded {is_preloaded}")


def session_niceness(pid: int | str) -> int | None:
    """None where the system has none, see sched(7)."""
    try:
        words = Path(f"/proc/{pid}/autogroup").read_text().split()
    except FileNotFoundError:
        return None
    return int(words[-1]) if words else None


def show_process(*_: str) -> None:
    say(
        json.dumps(
            {
                "argv": sys.argv[1:],
                "cwd": os.getcwd(),
                "name": __name__,
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                "niceness of the session": session_niceness("self"),
                "stdin": sys.stdin.read(),
                "leads_session": os.getsid(0) == os.getpid(),
                "in_place": {"jobs.agent", "jobs.store"} <= sys.modules.keys(),
            }
        )
    )


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
