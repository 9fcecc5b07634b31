"""`Runner`: takes jobs from the store, and starts an agent for each attempt (`jobs/agent.py`).

A lease gives an attempt to its agent for some seconds, and the agent extends it by heartbeats. So
several runners may share one store, and a job goes on when its runner dies. If the agent dies, a
runner ends the attempt: at once if the agent was on the runner's own machine, otherwise when the
lease has run out. The job then normally gets another attempt.

If a job names a launcher, an engine such as Slurm starts the agent (`jobs/engines.py`).
"""

import itertools
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.agent import BEAT_NOW, Attempt, ForkServer
from jobs.attempt import (
    AttemptInStore,
    Exit,
    Lost,
    StopReason,
    outcome_of_exit,
    record_result,
    time_limit,
)
from jobs.engines import Engines, runner_here
from jobs.errors import JobNotFound, LaunchError, LeaseLost, StoreError, is_temporary
from jobs.folder import is_of_another_job
from jobs.job import FindHead, Job, delivery_ids, job_environment, log_fields, outcome_of, unseal
from jobs.launcher import Launcher
from jobs.outcome import JobOutcome
from jobs.process import (
    ProcessIdentity,
    identify,
    is_alive,
    kill_session,
    name_of,
    process_here,
    send_signal,
)
from jobs.settings import JobsSettings
from jobs.spec import LOCAL
from jobs.store import JobStore

logger = logging.getLogger(__name__)

_SECONDS_AFTER_ERROR = 1.0
"""How long a runner waits after the store has failed, before it tries to use the store again."""
_ALIVE_SECONDS = 0.25
"""A runner updates the modification time of its `alive_file` at most once in this time."""
_STOP_SECONDS = 10.0
"""A runner that is being stopped kills an agent that still runs this long after the agent should
have killed its command."""


class Runner:
    """Runs the store's jobs. `run` does all work in the calling thread.

    Args:
        jobs_dir: The folder that contains one folder per job, with the job's id as its name.
        environment: The variables that every job gets. A job gets no other variables of the
            runner's own process.
        of_attempt: Returns the variables that only the current attempt of a job gets, such as its
            tokens.
        find_head: Reads the head of a ref for `JobStore.claim`.
        start_agent: Starts the agent of an attempt. Default: the fork server of this process.
        launchers: Name → the launcher that jobs with this name in their spec need.
        hub_url: The hub that agents elsewhere call, unless their launcher's settings name another
            URL of it.
        secret_key: The Fernet key that encrypted the secrets in specs, and signs tickets. Without
            this key, a job with secrets or a launcher fails to start.
        alive_file: While the runner works, it updates the modification time of this file several
            times a second (less often while the store fails). If the runner hangs, the modification
            time stays old, and another program can notice the hang.
    """

    def __init__(
        self,
        store: JobStore,
        jobs_dir: Path,
        settings: JobsSettings,
        environment: Mapping[str, str],
        *,
        of_attempt: Callable[[Job], Mapping[str, str]] = lambda job: {},
        find_head: FindHead | None = None,
        start_agent: Callable[[Attempt], None] | None = None,
        launchers: Mapping[str, Launcher] = {},
        hub_url: str = "",
        secret_key: bytes | None = None,
        alive_file: Path | None = None,
    ) -> None:
        self._store = store
        self._secret_key = secret_key
        self._jobs_dir = jobs_dir.absolute()
        self._settings = settings
        self._environment = dict(environment)
        self._of_attempt = of_attempt
        self._find_head = find_head
        self._start_agent = start_agent
        self._fork_server: ForkServer | None = None
        self._engines = Engines(
            store, settings, launchers, hub_url=hub_url, secret_key=secret_key, record=self._record
        )
        self._alive_file = alive_file
        self._next_touch = 0.0
        me = identify(os.getpid())
        assert me is not None
        self._name = f"{name_of(me)}/{uuid.uuid4().hex[:8]}"
        """The owners of this runner's attempts begin with this text."""
        self._numbers = itertools.count(1)
        self._running: dict[str, Job] = {}
        """The attempts on this machine that this runner watches: its own, and those that a dead
        runner has started. Owner → job."""
        self._told: set[str] = set()
        """The owners of the attempts that this runner has asked to end."""
        self._has_changed = True
        """Whether the store has changed since the last step that did not fail."""
        self._next_look = self._next_claim = 0.0
        self._late: dict[str | None, float] = {}
        """Owner → when this runner has first seen that the lease has run out. Monotonic clock."""
        self._stopping_since: float | None = None

    def run(self, stop: threading.Event, *, until_idle: bool = False) -> None:
        """Run jobs until `stop` is set. Then end the processes of the running jobs, and return. A
        job that has not ended by then gets a new attempt from the next runner. With `until_idle`,
        also return when every job of the store has ended, including those of other runners.

        If the store fails, the runner tries again until the store works. Raises StoreError if the
        store fails after `stop` was set, and LaunchError if `jobs_dir` cannot be used.
        """
        self._prepare()
        try:
            self._run(stop, until_idle)
        finally:
            self._engines.close()

    def _run(self, stop: threading.Event, until_idle: bool) -> None:
        while True:
            try:
                self._step(is_stopping=stop.is_set())
                idle = until_idle and not self._running and not self._store.has_open_jobs()
            except StoreError as error:
                if stop.is_set():
                    raise  # do not try again: the next runner finds the agents
                # A failed step can safely be repeated, so try again.
                logger.error("%s Trying again.", error)
                stop.wait(_SECONDS_AFTER_ERROR)
                idle = False
            if (stop.is_set() and not self._running) or idle:
                return
            self._touch_alive_file()
            if stop.is_set():
                time.sleep(self._settings.poll_seconds)
            else:
                stop.wait(self._settings.poll_seconds)

    def _prepare(self) -> None:
        try:
            self._jobs_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(
                f"No job can run in {self._jobs_dir}: {error.strerror}. Make this path a writable "
                "folder."
            ) from error
        if self._start_agent is None:
            self._fork_server = ForkServer((self._store.driver, *(self._settings.preload or ())))
            self._start_agent = self._fork_server.start

    def _touch_alive_file(self) -> None:
        now = time.monotonic()
        if self._alive_file is None or now < self._next_touch:
            return
        self._next_touch = now + _ALIVE_SECONDS
        try:
            self._alive_file.touch()
        except OSError as error:
            logger.warning(
                "The modification time of %s cannot be set: %s", self._alive_file, error.strerror
            )

    def _step(self, *, is_stopping: bool) -> None:
        now = time.monotonic()
        self._has_changed |= self._store.has_changed()
        if self._has_changed or now >= self._next_look:
            self._next_look = now + self._settings.heartbeat_seconds
            self._look()
            self._end_expired(now, is_stopping=is_stopping)
        self._engines.check_submissions()
        for job in list(self._running.values()):
            if _is_dead(job) or (is_stopping and job.handle is None):
                self._end_lost(job, is_stopping=is_stopping)
            elif is_stopping or job.cancel_requested:
                self._tell(job, is_stopping=is_stopping)
        if is_stopping:
            self._stop_rest(now)
        else:
            self._claim(now)
        self._has_changed = False

    # Watching attempts

    def _look(self) -> None:
        """Read which attempts run now."""
        attempts = [job for job in self._store.list(state="RUNNING") if job.owner is not None]
        self._engines.look([job for job in attempts if job.spec.launcher != LOCAL])
        running = {
            job.owner: job
            for job in attempts
            if job.spec.launcher == LOCAL
            and job.owner is not None
            and (job.owner.startswith(self._name) or _is_left_behind(job))
        }
        ended = [job for owner, job in self._running.items() if owner not in running]
        self._running = running
        for job in ended:
            try:
                _log_end(self._store.get(job.id))
            except JobNotFound:
                logger.warning(
                    "The store no longer has job %s, perhaps because it was restored from a "
                    "backup. To find out whether a push needs a new job, run: pipeline doctor",
                    job.id,
                )
            self._next_claim = 0.0  # a job may have waited for the end of this one

    def _end_expired(self, now: float, *, is_stopping: bool) -> None:
        expired = self._store.expired()
        self._late = {job.owner: self._late.get(job.owner, now) for job in expired}
        for job in expired:
            # An agent may be late because the store could not be reached, or because the machine
            # was suspended. So let it extend its lease first.
            if now > self._late[job.owner] + 2 * self._settings.heartbeat_seconds:
                if job.spec.launcher == LOCAL:
                    self._end_lost(job, is_stopping=is_stopping)
                elif not is_stopping:
                    self._engines.end_if_gone(job)

    def _tell(self, job: Job, *, is_stopping: bool) -> None:
        """Tell the agent, once, that it must end its attempt."""
        assert job.owner is not None
        if job.owner not in self._told and (agent := _agent_of(job)) is not None:
            self._told.add(job.owner)
            send_signal(agent.pid, signal.SIGTERM if is_stopping else BEAT_NOW)

    def _stop_rest(self, now: float) -> None:
        self._stopping_since = self._stopping_since or now
        limit = self._settings.kill_grace_seconds + _STOP_SECONDS
        if now > self._stopping_since + limit:
            for job in self._running.values():
                if (agent := _agent_of(job)) is not None:
                    kill_session(agent)

    def _end_lost(self, job: Job, *, is_stopping: bool) -> None:
        """End an attempt that no agent has begun, or whose agent is dead or frozen, or cannot reach
        the store."""
        assert job.owner is not None
        try:
            if job.handle is None:
                # Nobody can begin the attempt after this.
                self._store.hand_back(job.id, job.owner, only_unbegun=True)
                self._running.pop(job.owner, None)
                return
            self._running.pop(job.owner, None)
            if (agent := _agent_of(job)) is not None:
                kill_session(agent)
                now = self._store.get(job.id)
                if now.owner != job.owner:
                    return _log_end(now)  # the agent has recorded the end before it died
            logger.warning("Job %s: its agent is gone.", job.id, extra=log_fields(job))
            job_dir = self._jobs_dir / job.id
            if is_of_another_job(job_dir, job.identity):
                job_dir = job_dir / "none"  # so that nobody takes the outcome of the other job
            reason: StopReason | None = "shutdown" if is_stopping else None
            limit = time_limit(job, self._settings)
            self._record(job, outcome_of_exit(job, job_dir, Exit(), reason, limit))
        except (LeaseLost, JobNotFound) as error:
            # The attempt has ended, or its agent has begun it since this runner has looked.
            logger.warning("%s", error)
            self._next_look = 0.0
        except OSError as error:
            # Nothing is recorded yet, so the attempt is ended at a later step.
            logger.error("Job %s: %s; trying again", job.id, error)

    # Starting attempts

    def _claim(self, now: float) -> None:
        if self._fork_server is not None and not self._fork_server.is_ready:
            return
        if not self._has_changed and now < self._next_claim:
            return
        while True:
            has_room = len(self._running) < self._settings.max_running
            may_submit = self._engines.may_submit
            if not (has_room or may_submit):
                break
            owner = f"{self._name}.{next(self._numbers)}"
            job = self._store.claim(
                owner,
                self._settings.lease_seconds,
                self._find_head,
                is_local=None if has_room and may_submit else has_room,
            )
            if job is None:
                break
            if job.has_ended:
                _log_end(job)
                continue
            logger.info(
                "Job %s starts, for deliveries %s.",
                job.id,
                ", ".join(delivery_ids(job)) or "none",
                extra=log_fields(job),
            )
            if job.spec.launcher == LOCAL:
                self._running[owner] = job
            self._launch(job)
        wait = self._store.seconds_to_next()
        if wait is None or len(self._running) >= self._settings.max_running:
            wait = self._settings.heartbeat_seconds
        self._next_claim = now + min(wait, self._settings.heartbeat_seconds)

    def _launch(self, job: Job) -> None:
        assert job.owner is not None and self._start_agent is not None
        job_dir = self._jobs_dir / job.id
        try:
            if job.spec.launcher != LOCAL:
                return self._engines.submit(job)
            env = job_environment(
                job,
                job_dir,
                {**self._environment, **self._of_attempt(job)},
                num_threads=self._settings.threads(),
                unsealed=unseal(job.spec.sealed_env, self._secret_key),
            )
            calls = AttemptInStore(job=job, location=self._store.location, settings=self._settings)
            self._start_agent(
                Attempt(
                    job=job,
                    calls=calls,
                    jobs_dir=self._jobs_dir,
                    env=env,
                    settings=self._settings,
                )
            )
        except LaunchError as error:
            reason, may_pass = f"{job.id} could not start: {error}", is_temporary(error)
            outcome = outcome_of(job, "failed", stage="launch", reason=reason, may_pass=may_pass)
            self._running.pop(job.owner, None)
            self._record(job, outcome)

    def _record(self, job: Job, result: JobOutcome | Lost | None) -> None:
        try:
            _log_end(record_result(self._store, job, result, self._settings))
        except LeaseLost as lost:
            logger.warning("%s", lost)


def _agent_of(job: Job) -> ProcessIdentity | None:
    """The agent of the attempt. None if it has not begun, or runs on another machine."""
    return None if job.handle is None else process_here(job.handle)


def _is_dead(job: Job) -> bool:
    agent = _agent_of(job)
    return agent is not None and not is_alive(agent)


def _is_left_behind(job: Job) -> bool:
    """Whether an agent of this machine runs the attempt, and its runner is dead."""
    agent = _agent_of(job)
    if agent is None:
        return False
    runner = runner_here(job)
    return runner is not None and not is_alive(runner) and is_alive(agent)


def _log_end(job: Job) -> None:
    if not job.has_ended:
        reason = "" if job.last_failure is None else f": {job.last_failure.reason}"
        logger.warning("Job %s gets another attempt%s", job.id, reason, extra=log_fields(job))
        return
    logger.info(
        "Job %s is %s%s", job.id, job.state, _describe_end(job.outcome), extra=log_fields(job)
    )


def _describe_end(outcome: JobOutcome | None) -> str:
    if outcome is None:
        return "."
    where = f" in {outcome.stage}" if outcome.stage else ""
    release = f", release {outcome.release}" if outcome.release else ""
    return f": {outcome.result}{where}{release}" + (f": {outcome.reason}" if outcome.reason else "")
