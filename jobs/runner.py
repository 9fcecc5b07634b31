"""`Runner`: takes jobs from the store and sees each to its outcome: lease, launch, heartbeat, end.

Two runners on one store are safe. One that loses a lease leaves the job alone; one that dies has
its jobs adopted, and their processes with them.
"""

import json
import logging
import math
import os
import socket
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jobs.ending import Lost, ending
from jobs.environment import job_environment
from jobs.errors import LaunchError, LeaseLost, SealBroken, StoreError
from jobs.folder import PAYLOAD, SPEC, put_aside_if_of_another, write_whole
from jobs.launcher import Launch, Launcher, Status
from jobs.launchers.local import LocalLauncher
from jobs.outcome import JobOutcome
from jobs.record import Job, delivery_ids, failure
from jobs.sealed import unseal
from jobs.settings import JobsSettings
from jobs.spec import JobSpec
from jobs.store import JobStore

logger = logging.getLogger(__name__)

_SECONDS_AFTER_STORE_ERROR = 1.0

Stopping = Literal["cancel", "timeout", "shutdown"]


@dataclass
class _Held:
    """A job that this runner has the lease of."""

    job: Job
    handle: str | None
    next_heartbeat: float
    deadline: float
    """When it has run too long; infinite for no limit."""
    stopping: Stopping | None = None
    kill_at: float | None = None


class Runner:
    """Runs the store's jobs until it is told to stop. Everything happens in the calling thread.

    `environment` is what every job's process starts from, whole: nothing of this process's own
    variables is added to it. `jobs_dir` takes one folder per job, named by its id. `secret_key` is
    the Fernet key of whoever submits jobs with secrets; without one such a job cannot start.
    """

    def __init__(
        self,
        store: JobStore,
        jobs_dir: Path,
        settings: JobsSettings,
        environment: Mapping[str, str],
        *,
        launcher: Launcher | None = None,
        secret_key: bytes | None = None,
    ) -> None:
        self._store = store
        self._secret_key = secret_key
        self._jobs_dir = jobs_dir.absolute()
        self._settings = settings
        self._environment = dict(environment)
        self._launcher = launcher
        self._held: dict[str, _Held] = {}
        self._next_claim = 0.0
        self._next_adoption = 0.0
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        """How the store tells this runner from all others, earlier ones of this machine too."""

    def run(self, stop: threading.Event) -> None:
        """Run jobs until `stop` is set; then stop those that run, for the next runner to go on.

        Raises LaunchError where the folder of jobs cannot be used, and StoreError where the store
        fails while this stops. At any other time it waits for the store to come back.
        """
        self._run(stop, until_idle=False)

    def run_until_idle(self, stop: threading.Event) -> None:
        """Run jobs until none is pending or running here, or `stop` is set."""
        self._run(stop, until_idle=True)

    def _run(self, stop: threading.Event, *, until_idle: bool) -> None:
        launcher = self._launcher or self._local_launcher()
        try:
            while True:
                try:
                    self._turn(launcher, stops=stop.is_set())
                    idle = until_idle and not self._held and self._store.seconds_to_next() is None
                except StoreError as error:
                    if stop.is_set():
                        raise  # the next runner adopts what still runs
                    # Everything here can be done again: a database that is back finds it all.
                    logger.error("%s Trying again.", error)
                    stop.wait(_SECONDS_AFTER_STORE_ERROR)
                    idle = False
                if (stop.is_set() and not self._held) or idle:
                    return
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
                f"No job can be run in {self._jobs_dir}: {error.strerror}. It has to be a folder "
                "that can be written."
            ) from error

    def _turn(self, launcher: Launcher, *, stops: bool) -> None:
        now = time.monotonic()
        launcher.tend()
        changed = self._store.changed()
        if not stops:
            self._adopt(now)
            self._claim(now, changed)
        for held in list(self._held.values()):
            try:
                self._see_to(held, launcher, changed=changed, stops=stops)
            except LeaseLost as error:
                logger.warning("%s", error)
                del self._held[held.job.id]

    # Getting jobs

    def _adopt(self, now: float) -> None:
        if now < self._next_adoption:
            return
        self._next_adoption = now + self._settings.heartbeat_seconds
        for job in self._store.adopt(self.owner, self._settings.lease_seconds):
            logger.warning(
                "Job %s was left by its runner; going on with it.", job.id, extra=_ids(job)
            )
            self._hold(job)

    def _claim(self, now: float, changed: bool) -> None:
        if not changed and now < self._next_claim:
            return
        while len(self._held) < self._settings.max_running:
            job = self._store.claim(self.owner, self._settings.lease_seconds)
            if job is None:
                break
            logger.info(
                "Job %s starts, for deliveries %s.", job.id, _deliveries(job), extra=_ids(job)
            )
            self._hold(job)
        wait = self._store.seconds_to_next()
        if wait is None or len(self._held) >= self._settings.max_running:
            wait = self._settings.heartbeat_seconds
        self._next_claim = now + min(wait, self._settings.heartbeat_seconds)

    def _hold(self, job: Job) -> None:
        now = time.monotonic()
        limit, deadline = self._time_limit(job), math.inf
        if limit is not None and job.started_at is not None:
            deadline = now + limit - (self._store.now() - job.started_at)
        self._held[job.id] = _Held(
            job=job,
            handle=job.handle,
            next_heartbeat=now + self._settings.heartbeat_seconds,
            deadline=deadline,
        )

    # Seeing to them

    def _launch(self, held: _Held, launcher: Launcher) -> None:
        job = held.job
        job_dir = self._jobs_dir / job.id
        try:
            if job.spec.launcher != "local":
                raise LaunchError(
                    f"There is no launcher {job.spec.launcher!r} here; this runner has `local`."
                )
            identity = {"id": job.id, "created_at": job.created_at}
            aside = put_aside_if_of_another(job_dir, identity)
            if aside is not None:
                logger.warning(
                    "%s is of another database's job %s; it is now %s.",
                    job_dir,
                    job.id,
                    aside.name,
                    extra=_ids(job),
                )
            write_whole(job_dir / SPEC, job.spec.model_dump_json(indent=2))
            if job.payload is not None:
                write_whole(job_dir / PAYLOAD, json.dumps(job.payload))
            held.handle = launcher.start(
                Launch(
                    job_id=job.id,
                    attempt=job.attempt,
                    command=job.spec.command,
                    env=job_environment(
                        job,
                        job_dir,
                        self._environment,
                        num_threads=self._settings.threads(),
                        unsealed=self._unsealed(job.spec),
                    ),
                    job_dir=job_dir,
                    niceness=job.spec.resources.niceness,
                )
            )
            self._store.started(job.id, self.owner, held.handle)
        except (LaunchError, OSError) as error:
            outcome = failure(job, stage="launch", reason=f"{job.id} could not start: {error}")
            self._store.finish(job.id, self.owner, outcome)
            logger.warning("%s", outcome.reason, extra=_ids(job))
            del self._held[job.id]
            self._next_claim = 0.0

    def _unsealed(self, spec: JobSpec) -> dict[str, str]:
        if spec.sealed_env is None:
            return {}
        if self._secret_key is None:
            raise SealBroken("Its spec has secrets, and this runner was given no key for them.")
        return unseal(spec.sealed_env, self._secret_key)

    def _see_to(self, held: _Held, launcher: Launcher, *, changed: bool, stops: bool) -> None:
        now = time.monotonic()
        if now >= held.next_heartbeat:
            held.next_heartbeat = now + self._settings.heartbeat_seconds
            changed |= self._store.heartbeat(held.job.id, self.owner, self._settings.lease_seconds)
        if changed:
            held.job = self._store.get(held.job.id)
            if held.job.owner != self.owner:
                raise LeaseLost(held.job.id, self.owner)
        if held.handle is None:
            if stops:
                self._let_go(held)
            else:
                self._launch(held, launcher)
            return
        status = launcher.poll(held.handle)
        if status.phase in ("exited", "vanished"):
            self._end(held, status, launcher)
        elif held.stopping is None:
            reason = self._reason_to_stop(held, now, stops)
            if reason is not None:
                self._stop(held, launcher, reason)
        elif status.phase == "starting":
            launcher.stop(held.handle, force=False)  # there may have been nobody to ask before
        elif held.kill_at is not None and now >= held.kill_at:
            held.kill_at = now + 1.0  # until it is gone: a fork may have escaped the last one
            launcher.stop(held.handle, force=True)

    @staticmethod
    def _reason_to_stop(held: _Held, now: float, stops: bool) -> Stopping | None:
        if held.job.cancel_requested:
            return "cancel"
        if now >= held.deadline:
            return "timeout"
        return "shutdown" if stops else None

    def _time_limit(self, job: Job) -> float | None:
        return job.spec.resources.timeout_seconds or self._settings.timeout_seconds

    def _stop(self, held: _Held, launcher: Launcher, reason: Stopping) -> None:
        assert held.handle is not None
        # Asked right before: nothing of a job may be touched that another runner has taken.
        self._store.heartbeat(held.job.id, self.owner, self._settings.lease_seconds)
        logger.info("Job %s is stopped: %s.", held.job.id, reason, extra=_ids(held.job))
        held.stopping = reason
        held.kill_at = time.monotonic() + self._settings.kill_grace_seconds
        launcher.stop(held.handle, force=False)

    def _end(self, held: _Held, status: Status, launcher: Launcher) -> None:
        assert held.handle is not None
        result = ending(
            held.job,
            self._jobs_dir / held.job.id,
            status,
            stopping=held.stopping,
            time_limit=self._time_limit(held.job),
        )
        if status.phase == "vanished":
            # Whoever led the session is dead; what it led may be alive.
            self._store.heartbeat(held.job.id, self.owner, self._settings.lease_seconds)
            launcher.stop(held.handle, force=True)
        if isinstance(result, Lost):
            if held.stopping == "shutdown":
                self._let_go(held)
                return
            logger.warning("Job %s: %s", held.job.id, result.reason, extra=_ids(held.job))
            job = self._store.retry(held.job.id, self.owner, result.reason)
        else:
            job = self._store.finish(held.job.id, self.owner, result)
        if not job.has_ended:
            held.job, held.handle = job, None
            return
        logger.info("Job %s is %s%s", job.id, job.state, _in_words(job.outcome), extra=_ids(job))
        del self._held[job.id]
        self._next_claim = 0.0  # a job that waited for this one may be due

    def _let_go(self, held: _Held) -> None:
        self._store.release(held.job.id, self.owner)
        del self._held[held.job.id]


def _ids(job: Job) -> dict[str, object]:
    """For logs that machines read."""
    return {
        "job_id": job.id,
        "pipeline": job.spec.pipeline,
        "delivery_ids": list(delivery_ids(job)),
    }


def _in_words(outcome: JobOutcome | None) -> str:
    if outcome is None:
        return "."
    where = f" in {outcome.stage}" if outcome.stage else ""
    release = f", release {outcome.release}" if outcome.release else ""
    return f": {outcome.result}{where}{release}" + (f": {outcome.reason}" if outcome.reason else "")


def _deliveries(job: Job) -> str:
    revisions = job.spec.revisions
    return ", ".join(revisions.delivery_ids) if revisions and revisions.delivery_ids else "none"
