"""`Runner`: takes jobs from the store and runs them. For each job, the runner takes the lease,
launches the command, extends the lease by heartbeats, and records the outcome.

A lease gives a job to one runner for some seconds, so several runners may share one store. If a
runner dies, its leases run out, and another runner *adopts* (takes over) its jobs. If the processes
of these jobs still run, the new runner watches these processes. A runner that has lost the lease of
a job no longer touches the job, but it kills the processes of its own outdated attempts.
"""

import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs.errors import DamagedRecord, JobNotFound, LaunchError, LeaseLost, StoreError
from jobs.job import FindHead, Job, delivery_ids, failure, log_fields
from jobs.launcher import Launcher, Status
from jobs.launchers.local import LocalLauncher
from jobs.launching import start_attempt
from jobs.outcome import JobOutcome
from jobs.outcome_of_exit import Lost, outcome_of_exit
from jobs.settings import JobsSettings
from jobs.store import JobStore
from jobs.temporary_failures import is_temporary

logger = logging.getLogger(__name__)

_SECONDS_AFTER_STORE_ERROR = 1.0
"""How long a runner waits after the store has failed, before it tries to use the store again."""
_ALIVE_SECONDS = 0.25
"""A runner updates the modification time of its `alive_file` at most once in this time."""

_RETRY_FACTOR = 4
"""After a temporary failure, the next attempt waits for `retry_seconds`. Each earlier attempt that
was lost or failed multiplies this wait by this factor."""

StopReason = Literal["cancel", "timeout", "shutdown"]


@dataclass
class _LeasedJob:
    """A job whose lease this runner holds. All times are by the monotonic clock."""

    job: Job
    handle: str | None
    """The launcher's name for the current attempt. None if the attempt was not launched yet."""
    next_heartbeat: float
    deadline: float
    """When the job reaches its time limit; infinite if the job has no limit."""
    failed: JobOutcome | None = None
    """How the last attempt failed. This is set only while the job waits for its next attempt."""
    launch_at: float = 0.0
    """When the next attempt may be launched. If `max_running` jobs run at that time, the attempt is
    launched later."""
    waits_since: float = 0.0
    """When the job began to wait for its next attempt."""
    stop_reason: StopReason | None = None
    """Why this runner has asked the job's processes to end. None if it has not asked them."""
    kill_at: float | None = None
    """If the job's processes still run at this time, the runner kills them. None if the runner has
    not asked the processes to end."""

    @property
    def waited_seconds(self) -> float:
        """How long the job has waited for its next attempt."""
        return 0.0 if self.failed is None else time.monotonic() - self.waits_since


class Runner:
    """Runs the store's jobs. A runner starts no thread: `run` does all work in the calling thread.

    Args:
        jobs_dir: The folder that contains one folder per job, with the job's id as its name.
        environment: The variables that every job gets. A job gets no other variables of the
            runner's own process.
        of_attempt: Returns the variables that only the current attempt of a job gets, such as its
            tokens.
        find_head: Reads the head of a ref for `JobStore.claim`.
        launcher: Starts the commands. Default: a `LocalLauncher`.
        secret_key: The Fernet key that encrypted the secrets in specs. Without this key, a job with
            secrets fails to start.
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
        launcher: Launcher | None = None,
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
        self._launcher = launcher
        self._alive_file = alive_file
        self._next_touch = 0.0
        self._leased: dict[str, _LeasedJob] = {}
        self._left: dict[str, Job] = {}
        """Handle → job of the attempts that this runner has started before it lost the lease. While
        such an attempt is the current one of its job, another runner watches the processes. When
        it is not the current one any more, this runner kills them."""
        self._has_unseen_changes = False
        """Whether the store may have changed since the last step that did not fail."""
        self._has_new_file = False
        """Whether the store has begun to use a new file, and this runner has not yet forgotten the
        jobs that only the old file had."""
        self._next_claim = 0.0
        self._next_adoption = 0.0
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        """The unique name of this runner in the store."""

    def run(self, stop: threading.Event) -> None:
        """Run jobs until `stop` is set. Then end the processes of the running jobs, and return. A
        job that has not ended by then gets a new attempt from the next runner.

        If the store fails, the runner tries again until the store works. Raises StoreError if the
        store fails after `stop` was set, and LaunchError if `jobs_dir` cannot be used. Raises
        OSError or DamagedRecord if a file in a job's folder cannot be read or written, and the
        cause is temporary, such as a full disk. After an error, the next runner adopts the running
        jobs.
        """
        self._run(stop, until_idle=False)

    def run_until_idle(self, stop: threading.Event) -> None:
        """Run jobs until every job of the store has ended. If `stop` is set before that, end the
        processes of the running jobs and return, as `run` does.

        This runner also waits for the jobs of other runners: if such a runner is dead, this runner
        adopts its jobs after their leases have run out.
        """
        self._run(stop, until_idle=True)

    def _run(self, stop: threading.Event, *, until_idle: bool) -> None:
        launcher = self._launcher or self._local_launcher()
        try:
            while True:
                try:
                    self._step(launcher, is_stopping=stop.is_set())
                    idle = until_idle and not self._leased and not self._store.has_open_jobs()
                except StoreError as error:
                    if stop.is_set():
                        raise  # do not try again, because the next runner adopts the running jobs
                    # A failed step can safely be repeated, so try again.
                    logger.error("%s Trying again.", error)
                    stop.wait(_SECONDS_AFTER_STORE_ERROR)
                    idle = False
                if (stop.is_set() and not self._leased) or idle:
                    return
                self._touch_alive_file()
                if stop.is_set():
                    time.sleep(self._settings.poll_seconds)
                else:
                    stop.wait(self._settings.poll_seconds)
        finally:
            launcher.close()

    def _local_launcher(self) -> LocalLauncher:
        try:
            self._jobs_dir.mkdir(parents=True, exist_ok=True)
            return LocalLauncher(
                self._jobs_dir, preload=self._settings.preload or (), environment=self._environment
            )
        except OSError as error:
            raise LaunchError(
                f"No job can run in {self._jobs_dir}: {error.strerror}. Make this path a writable "
                "folder."
            ) from error

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

    def _step(self, launcher: Launcher, *, is_stopping: bool) -> None:
        now = time.monotonic()
        launcher.poll_processes()
        self._has_new_file |= self._store.follow_file()
        if self._has_new_file:
            self._forget_lost_jobs(launcher)
            self._has_new_file = False
        # Keep this flag until the end of the step. If the store fails during the step, the next
        # step must read the jobs again, even if `self._store.changed()` then returns False.
        self._has_unseen_changes |= self._store.changed()
        changed = self._has_unseen_changes
        if not is_stopping:
            self._adopt(now)
            self._claim(now, changed)
        for leased in list(self._leased.values()):
            try:
                try:
                    self._advance(leased, launcher, changed=changed, is_stopping=is_stopping)
                except (DamagedRecord, OSError) as error:
                    self._give_up(leased, launcher, error)
            except LeaseLost as error:
                logger.warning("%s", error)
                del self._leased[leased.job.id]
                if leased.handle is not None:
                    self._left[leased.handle] = leased.job
            except JobNotFound:
                self._forget(leased, launcher)
        for handle, job in list(self._left.items()):
            self._kill_if_outdated(handle, job, launcher)
        self._has_unseen_changes = False

    # Getting jobs

    def _adopt(self, now: float) -> None:
        if now < self._next_adoption:
            return
        self._next_adoption = now + self._settings.heartbeat_seconds
        lease_seconds = self._settings.lease_seconds
        for job in self._store.adopt(self.owner, lease_seconds, held=self._leased):
            logger.warning(
                "Job %s: its lease ran out or was given up; this runner continues the job.",
                job.id,
                extra=log_fields(job),
            )
            self._track(job)

    @property
    def _has_room(self) -> bool:
        """Whether fewer than `max_running` jobs run. A job that waits for its next attempt does not
        count."""
        running = sum(leased.failed is None for leased in self._leased.values())
        return running < self._settings.max_running

    def _claim(self, now: float, changed: bool) -> None:
        if not changed and now < self._next_claim:
            return
        while self._has_room:
            job = self._store.claim(self.owner, self._settings.lease_seconds, self._find_head)
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
            self._track(job)
        wait = self._store.seconds_to_next()
        if wait is None or not self._has_room:
            wait = self._settings.heartbeat_seconds
        self._next_claim = now + min(wait, self._settings.heartbeat_seconds)

    def _track(self, job: Job) -> None:
        now = time.monotonic()
        limit, deadline = self._time_limit(job), math.inf
        if limit is not None and job.started_at is not None:
            deadline = now + limit - (self._store.now() - job.started_at)
        leased = self._leased[job.id] = _LeasedJob(
            job=job,
            handle=job.handle,
            next_heartbeat=now + self._settings.heartbeat_seconds,
            deadline=deadline,
        )
        is_attempted_again = job.handle is None and job.attempt > 1
        if is_attempted_again and (wait := job.run_after - self._store.now()) > 0:
            # An earlier attempt failed, and the next attempt must wait. The store does not record
            # why the attempt failed. Normally an earlier runner ran it, and has logged the cause.
            reason = f"An earlier attempt of {job.id} failed."
            self._schedule_attempt(leased, failure(job, stage="lost", reason=reason), wait)

    # Running jobs

    def _launch(self, leased: _LeasedJob, launcher: Launcher) -> None:
        job = leased.job
        try:
            leased.handle = start_attempt(
                job,
                self._jobs_dir / job.id,
                launcher,
                {**self._environment, **self._of_attempt(job)},
                num_threads=self._settings.threads(),
                secret_key=self._secret_key,
            )
            waited = leased.waited_seconds
            # Set these values before the store is called. The attempt runs even if this call fails,
            # so the job must not count as waiting any more.
            leased.deadline += waited
            leased.failed = None
            self._store.started(job.id, self.owner, leased.handle, waited_seconds=waited)
        except (LaunchError, OSError) as error:
            outcome = failure(job, stage="launch", reason=f"{job.id} could not start: {error}")
            logger.warning("%s", outcome.reason, extra=log_fields(job))
            if is_temporary(error):
                self._after_result(leased, self._retry(leased, outcome))
            else:
                self._after_result(leased, self._store.finish(job.id, self.owner, outcome))

    def _schedule_attempt(self, leased: _LeasedJob, failed: JobOutcome, seconds: float) -> None:
        now = time.monotonic()
        if leased.failed is None:
            leased.waits_since = now
        leased.failed, leased.launch_at = failed, now + seconds

    def _retry(self, leased: _LeasedJob, failed: JobOutcome) -> Job:
        """Plan the next attempt after a failure with a temporary cause. If the job gets no further
        attempt, end the job instead. Returns the changed job."""
        job = leased.job
        seconds = self._settings.retry_seconds * _RETRY_FACTOR**job.num_lost
        job = self._store.retry(job.id, self.owner, failed, seconds)
        if not job.has_ended:
            logger.warning(
                "Job %s is tried again in %g s: %s",
                job.id,
                seconds,
                failed.reason,
                extra=log_fields(job),
            )
            self._schedule_attempt(leased, failed, seconds)
        return job

    def _may_launch_again(self, leased: _LeasedJob, failed: JobOutcome, changed: bool) -> bool:
        """Whether to launch the next attempt of a waiting job now. `failed` is the outcome of the
        last attempt, and `changed` says whether the store may have changed.

        If the job was cancelled, this method ends the job and returns False. It does the same if a
        newer push job is pending.
        """
        job = leased.job
        if job.cancel_requested:
            outcome = JobOutcome(
                result="cancelled",
                stage=failed.stage,
                reason=f"Cancelled while it waited for another attempt. {failed.reason}",
                delivery_ids=delivery_ids(job),
                job_id=job.id,
            )
            self._after_result(leased, self._store.finish(job.id, self.owner, outcome))
            return False
        if changed:
            ended = self._store.give_way(job.id, self.owner, failed)
            if ended.has_ended:
                self._after_result(leased, ended)
                return False
        return time.monotonic() >= leased.launch_at and self._has_room

    def _advance(
        self, leased: _LeasedJob, launcher: Launcher, *, changed: bool, is_stopping: bool
    ) -> None:
        now = time.monotonic()
        if now >= leased.next_heartbeat:
            leased.next_heartbeat = now + self._settings.heartbeat_seconds
            changed |= self._store.heartbeat(
                leased.job.id, self.owner, self._settings.lease_seconds
            )
        if changed:
            job = self._store.get(leased.job.id)
            if job.owner != self.owner:
                raise LeaseLost(job.id, self.owner)
            if job.attempt > leased.job.attempt:
                # This runner asked the store for a retry of the last attempt. The store has stored
                # the retry, but then failed, so this runner got no answer. Do not ask again,
                # because the last attempt would then count twice.
                self._track(job)
                return
            leased.job = job
        if leased.handle is None:
            if is_stopping:
                self._release(leased)
            elif leased.failed is None or self._may_launch_again(leased, leased.failed, changed):
                self._launch(leased, launcher)
            return
        status = launcher.poll(leased.handle)
        if status.phase in ("exited", "vanished"):
            self._handle_exit(leased, status, launcher)
        elif leased.stop_reason is None:
            reason = self._why_stop(leased, now, is_stopping)
            if reason is not None:
                self._stop(leased, launcher, reason)
        elif status.phase == "starting":
            # Stop the attempt again, because its process may not have existed at the last `stop`.
            launcher.stop(leased.handle, force=False)
        elif leased.kill_at is not None and now >= leased.kill_at:
            # Kill again every second until the processes are gone: the last kill may have missed a
            # process that was just being forked.
            leased.kill_at = now + 1.0
            launcher.stop(leased.handle, force=True)

    @staticmethod
    def _why_stop(leased: _LeasedJob, now: float, is_stopping: bool) -> StopReason | None:
        if leased.job.cancel_requested:
            return "cancel"
        if now >= leased.deadline:
            return "timeout"
        return "shutdown" if is_stopping else None

    def _time_limit(self, job: Job) -> float | None:
        return job.spec.resources.timeout_seconds or self._settings.timeout_seconds

    def _stop(self, leased: _LeasedJob, launcher: Launcher, reason: StopReason) -> None:
        assert leased.handle is not None
        # Check the lease first: `heartbeat` raises LeaseLost if another runner has adopted the job.
        self._store.heartbeat(leased.job.id, self.owner, self._settings.lease_seconds)
        logger.info(
            "Job %s is being stopped (%s).", leased.job.id, reason, extra=log_fields(leased.job)
        )
        leased.stop_reason = reason
        leased.kill_at = time.monotonic() + self._settings.kill_grace_seconds
        launcher.stop(leased.handle, force=False)

    def _handle_exit(self, leased: _LeasedJob, status: Status, launcher: Launcher) -> None:
        assert leased.handle is not None
        result = outcome_of_exit(
            leased.job,
            self._jobs_dir / leased.job.id,
            status,
            stop_reason=leased.stop_reason,
            time_limit=self._time_limit(leased.job),
        )
        if status.phase == "vanished":
            # The process that leads the job's session is dead, but other processes of the session
            # may still run, so kill them. Before that, `heartbeat` checks that this runner still
            # has the lease.
            self._store.heartbeat(leased.job.id, self.owner, self._settings.lease_seconds)
            launcher.stop(leased.handle, force=True)
        if isinstance(result, Lost):
            if leased.stop_reason == "shutdown":
                self._release(leased)
                return
            logger.warning("Job %s: %s", leased.job.id, result.reason, extra=log_fields(leased.job))
            lost = failure(leased.job, stage="lost", reason=result.reason)
            job = self._store.retry(leased.job.id, self.owner, lost)
        elif result is not None and result.result == "failed" and result.may_pass:
            job = self._retry(leased, result)
        else:
            job = self._store.finish(leased.job.id, self.owner, result)
        self._after_result(leased, job)

    def _give_up(self, leased: _LeasedJob, launcher: Launcher, error: Exception) -> None:
        """End a job as failed, because a file in its folder cannot be used. Other jobs go on."""
        if is_temporary(error):
            raise error  # the cause is the machine, so end `run` instead of this job
        job, reason = leased.job, f"{leased.job.id} cannot be watched: {error}"
        if leased.handle is not None:
            # Before a kill, `heartbeat` checks that this runner still has the lease.
            self._store.heartbeat(job.id, self.owner, self._settings.lease_seconds)
            try:
                launcher.stop(leased.handle, force=True)
            # For example, the damaged file is the one that says which processes the job has.
            except (DamagedRecord, OSError):
                reason += " Processes of the job may still run."
        outcome = failure(job, stage="lost", reason=reason)
        logger.warning("%s", outcome.reason, extra=log_fields(job))
        self._after_result(leased, self._store.finish(job.id, self.owner, outcome))

    def _forget_lost_jobs(self, launcher: Launcher) -> None:
        """Forget each job of this runner that is lost: the store's new file does not have the job,
        or this runner is not the job's owner there. Call this before a job of the new file is
        started, because the new job may have the id of a lost job."""
        logger.error("The file of the job store was deleted or replaced; a new file is used.")
        for leased in list(self._leased.values()):
            try:
                is_known = self._store.get(leased.job.id).owner == self.owner
            except JobNotFound:
                is_known = False
            if not is_known:
                self._forget(leased, launcher)

    def _kill_if_outdated(self, handle: str, left: Job, launcher: Launcher) -> None:
        try:
            job = self._store.get(left.id)
            is_outdated = job.has_ended or job.attempt > left.attempt
        except JobNotFound:
            is_outdated = True
        try:
            # The process may not exist yet, so go on until the launcher says that it is gone.
            if launcher.poll(handle).phase in ("starting", "running"):
                if is_outdated:
                    launcher.stop(handle, force=True)
                return
        except (DamagedRecord, OSError) as error:
            logger.warning("Processes of %s may still run: %s", handle, error)
        del self._left[handle]

    def _forget(self, leased: _LeasedJob, launcher: Launcher) -> None:
        """Kill the processes of a job that the store no longer has as a job of this runner, and
        forget the job. Other jobs go on."""
        job = leased.job
        logger.warning(
            "The store no longer has job %s as a job of this runner, perhaps because the store was "
            "restored from a backup. The processes of the job are killed. To find out whether a "
            "push needs a new job, run: pipeline doctor",
            job.id,
            extra=log_fields(job),
        )
        if leased.handle is not None:
            try:
                launcher.stop(leased.handle, force=True)
            except (DamagedRecord, OSError) as error:
                logger.warning(
                    "Processes of job %s may still run: %s", job.id, error, extra=log_fields(job)
                )
        del self._leased[job.id]

    def _after_result(self, leased: _LeasedJob, job: Job) -> None:
        """Act on the result of an attempt. `job` is the job as the store has recorded it after the
        attempt: it has ended, or it gets another attempt."""
        if not job.has_ended:
            leased.job, leased.handle = job, None
            return
        _log_end(job)
        del self._leased[job.id]
        self._next_claim = 0.0  # claim at once, because a job may have waited for the end of `job`

    def _release(self, leased: _LeasedJob) -> None:
        self._store.release(leased.job.id, self.owner, waited_seconds=leased.waited_seconds)
        del self._leased[leased.job.id]


def _log_end(job: Job) -> None:
    logger.info(
        "Job %s is %s%s", job.id, job.state, _describe_end(job.outcome), extra=log_fields(job)
    )


def _describe_end(outcome: JobOutcome | None) -> str:
    if outcome is None:
        return "."
    where = f" in {outcome.stage}" if outcome.stage else ""
    release = f", release {outcome.release}" if outcome.release else ""
    return f": {outcome.result}{where}{release}" + (f": {outcome.reason}" if outcome.reason else "")
