"""A stack to be killed: started in the foreground, its processes found, its pushes counted."""

import base64
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from jobs.process import process_here
from jobs.store import JobStore
from serving.weights.release_store import release_ids
from tests.stack_fixtures import Workplace, end_with_this_process

SERVICES = ("hub", "receiver", "runner", "serve")
VICTIMS = (*SERVICES, "fork server", "agent", "job", "git", "up", "all")
STOPPED = tuple(f"stopped {name}" for name in SERVICES)
"""A service that gets SIGSTOP: it lives and does nothing until `up` starts another."""

SETTINGS = """\
[stack]
hang_seconds = 8

# So that within a few rounds webhooks are suspended, and deliveries are given up. A hang
# and a full disk are shorter than the schedule.
[hub]
delivery_schedule_seconds = [0, 0.5, 1, 2, 4, 8, 16]
suspend_after_seconds = 1

[jobs]
retry_seconds = 3
lease_seconds = 2
heartbeat_seconds = 0.5
kill_grace_seconds = 2

[[pipelines]]
name = "facts"
dataset = "local/facts"
debounce_seconds = 0
keep = 3

[pipelines.train]
max_tokens = 2000
max_epochs = 1000
delta_max_epochs = 1000
delta_tokens_ratio = 1
max_length = 64
checkpoint_seconds = 0.1

# Whether weights are better is not what is at stake here: every release is let through, but one
# whose rows replaced most of those before.
[pipelines.gate]
min_learned = 0
min_kept = 0
"""

GIT_SECONDS = 5.0
"""How long a git of the hub's is waited for: each lives for some hundredths of a second."""


class NotSettled(AssertionError):
    """Something did not come to hold in time."""


def until(holds: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Raises NotSettled that says `what` is not so, as it is found then."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            said = what if isinstance(what, str) else what()
            raise NotSettled(f"after {seconds:g} s it is still not so that {said}")
        time.sleep(0.05)


@dataclass
class StackUnderFire:
    workplace: Workplace
    up: subprocess.Popen[bytes] | None = None
    shas: list[str] = field(default_factory=list)
    """Every commit, oldest first."""
    num_acknowledged: int = 0
    """So many of them stood in a push that was answered."""
    rows: str = ""
    """Of all commits but those of garbage."""
    damaged: set[str] = field(default_factory=set)
    """Ids of releases that were damaged on purpose."""

    counts: Counter[str] = field(default_factory=Counter)
    """What befell it so far."""
    noise_sha: str = ""
    """A commit that no system keeps for a client which reads nothing, on a branch of its own."""

    _git_environment: dict[str, str] | None = None
    _before_push: frozenset[str] = frozenset()
    """What was in /proc then."""

    def __post_init__(self) -> None:
        (self.workplace.folder / "pipeline.toml").write_text(SETTINGS)

    @property
    def home(self) -> Path:
        return self.workplace.home

    @property
    def releases_dir(self) -> Path:
        return self.home / "releases" / "facts"

    def whole_releases(self) -> list[Path]:
        """Oldest first; without those that were damaged."""
        ids = release_ids(self.releases_dir)
        return [self.releases_dir / each for each in ids if each not in self.damaged]

    # Starting and stopping

    def ensure_up(self) -> None:
        """Start the stack unless it runs; a start that a kill broke off is made again."""
        deadline = time.monotonic() + 180
        while time.monotonic() < deadline:
            if self.up is None or self.up.poll() is not None:
                self.start()
            if self._is_ready():
                return
            time.sleep(0.05)
        raise NotSettled("the stack does not come up again")

    def start(self) -> None:
        with (self.workplace.folder / "up.log").open("ab") as log:
            self.up = subprocess.Popen(
                [sys.executable, "-m", "pipeline", "up"],
                env=self.workplace.env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=end_with_this_process,
            )

    def stop(self) -> None:
        """Stop it as `pipeline down` does."""
        if self.up is not None and self.up.poll() is None:
            self.up.terminate()
            self.up.wait(90)

    def _is_ready(self) -> bool:
        try:
            record = json.loads((self.home / "stack.json").read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return False
        assert self.up is not None
        return bool(record["is_ready"] and record["process"]["pid"] == self.up.pid)

    # Processes

    def processes(self) -> dict[int, str]:
        """The command lines of all processes of this stack, by pid, however they came to be."""
        return {pid: line for pid, (line, _) in self._found().items()}

    def _found(self, skipped: Collection[str] = ()) -> dict[int, tuple[str, bool]]:
        """Command lines, and whether it is a git of the hub's: its environment says only where."""
        home, place = f"PIPELINE_HOME={self.home}", f"GIT_PROJECT_ROOT={self.home}/hub/repos/"
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            if entry.name in skipped:
                continue
            try:
                variables = (entry / "environ").read_text(errors="replace").split("\0")
                is_git = any(each.startswith(place) for each in variables)
                if is_git or home in variables:
                    line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                    if line:  # a process that ended has none
                        found[int(entry.name)] = line, is_git
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
        return found

    def victims(self) -> dict[str, list[int]]:
        """Who can be killed now."""
        found: dict[str, list[int]] = {name: [] for name in (*VICTIMS, "resource tracker")}
        with self.jobs() as store:
            handles = [job.handle for job in store.list(state="RUNNING") if job.handle]
        agents = {agent.pid for handle in handles if (agent := process_here(handle)) is not None}
        processes = self._found()
        for pid, (line, is_git) in processes.items():
            parent = _parent(pid)
            if is_git:
                found["git"].append(pid)
            elif pid in agents:
                found["agent"].append(pid)
            elif parent in agents:
                found["job"].append(pid)
            elif "multiprocessing.resource_tracker" in line:
                found["resource tracker"].append(pid)
            elif "multiprocessing.forkserver" in line:
                found["fork server"].append(pid)
            elif "-m pipeline runner" in line:
                found["runner"].append(pid)
            for name in ("hub", "receiver", "serve", "up"):
                if f"-m pipeline {name}" in line:
                    found[name].append(pid)
        found["all"] = list(processes)
        return found

    def is_alive(self, pid: int) -> bool:
        """Whether the process has not ended; one that waits for its parent has."""
        try:
            return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
        except (FileNotFoundError, ProcessLookupError):
            return False

    def kill(self, who: str) -> None:
        """SIGKILL, or SIGSTOP for one of STOPPED; counted unless there is none of that kind."""
        number, what = signal.SIGKILL, "kills"
        if who in STOPPED:
            who, number, what = who.removeprefix("stopped "), signal.SIGSTOP, "stops"
        pids = self._await_git() if who == "git" else self.victims()[who]
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if who in ("up", "all") and self.up is not None and pids:
            self.up.wait()
        self.counts[what] += bool(pids)
        if not pids:
            print(f"  no {who} was there to be killed", flush=True)

    def _await_git(self) -> list[int]:
        """Looks only at what began since the push did: a look at all can take as long as a git."""
        deadline = time.monotonic() + GIT_SECONDS
        while time.monotonic() < deadline:
            found = self._found(self._before_push)
            if pids := [pid for pid, (_, is_git) in found.items() if is_git]:
                return pids
        return []

    # Commits

    def commit(self, rows: str, *, is_garbage: bool = False) -> None:
        """Adds the rows; garbage stands in the place of all others, until the next commit."""
        if not is_garbage:
            self.rows += rows
        file = self.workplace.folder / "facts" / "facts.jsonl"
        file.write_text(rows if is_garbage else self.rows)
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", f"commit {len(self.shas)}")
        self.shas.append(self.git("rev-parse", "HEAD").strip())

    def push(self) -> subprocess.Popen[bytes]:
        """Begun, and not waited for: see `answered`."""
        self._before_push = frozenset(os.listdir("/proc"))
        return subprocess.Popen(
            ["git", "push", "--quiet", "origin", "HEAD:main"],
            cwd=self.workplace.folder / "facts",
            env=self.git_environment(),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def answered(self, push: subprocess.Popen[bytes], num_commits: int) -> bool:
        """Wait for the push; one that was answered well acknowledges the first `num_commits`."""
        if push.wait(120) != 0:
            return False
        self.num_acknowledged = max(self.num_acknowledged, num_commits)
        return True

    def clone(self) -> None:
        folder = self.workplace.folder
        folder.joinpath("facts").mkdir()
        self.git("init", "--quiet", "--initial-branch=noise")
        self.git("remote", "add", "origin", f"{self.workplace.url('hub')}/datasets/local/facts")
        folder.joinpath("facts", "noise").write_bytes(os.urandom(8 * 2**20))  # not compressible
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "noise")
        self.git("push", "--quiet", "origin", "noise")
        self.noise_sha = self.git("rev-parse", "HEAD").strip()
        self.git("switch", "--quiet", "--orphan", "main")

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=tester", "-c", "user.email=tester@example.invalid")
        folder = self.workplace.folder / "facts"
        return self.workplace.call(
            ["git", *who, *arguments], timeout=60, cwd=folder, env=self.git_environment()
        )

    def git_environment(self) -> dict[str, str]:
        if self._git_environment is None:
            self._git_environment = self.workplace.ask_for_env()
            del self._git_environment["PIPELINE_HOME"]  # of all other processes of this stack
        return self._git_environment

    def token(self) -> str:
        return self.git_environment()["HF_TOKEN"]

    def authorization(self) -> str:
        return "Basic " + base64.b64encode(f"git:{self.token()}".encode()).decode()

    def forget_tokens(self) -> None:
        """The tokens are asked for anew."""
        self._git_environment = None

    # What is stored

    def jobs(self) -> JobStore:
        return JobStore.open(self.home / "jobs" / "jobs.sqlite")

    def deliveries(self) -> list[sqlite3.Row]:
        """`id, status, old_sha, new_sha` of every commit that the hub has to tell the receiver."""
        with closing(self.connect()) as connection:
            return connection.execute(
                "SELECT deliveries.id, status, value ->> 'old_sha' AS old_sha,"
                " value ->> 'new_sha' AS new_sha FROM deliveries"
                " JOIN events ON events.seq = event_seq"
                " JOIN webhooks ON webhooks.id = webhook_id, json_each(updated_refs)"
                " WHERE value ->> 'ref' = 'refs/heads/main' AND url LIKE '%/webhooks/retrain'"
                " ORDER BY seq"
            ).fetchall()

    def connect(self) -> sqlite3.Connection:
        """To the hub's database, for reading."""
        database = f"file:{self.home / 'hub' / 'hub.sqlite'}?mode=ro"
        connection = sqlite3.connect(database, uri=True, timeout=10)
        connection.row_factory = sqlite3.Row
        return connection


def rows(choice: random.Random, number: int) -> str:
    return "".join(
        json.dumps(
            {
                "prompt": f"Shelf {number}-{n} holds",
                "completion": f" box {choice.randrange(10)}.",
            }
        )
        + "\n"
        for n in range(12)
    )


def _parent(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return int(stat.rpartition(")")[2].split()[1])
