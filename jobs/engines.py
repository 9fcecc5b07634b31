"""`Engines`: the attempts of a runner's jobs that an engine, such as Slurm, starts by a launcher.

When such an agent begins and ends, the store learns from the agent, as from one on this machine.
The engine is asked only when a lease has run out: while it has the attempt in its queue, the lease
is extended; otherwise it says why the agent is gone. An engine such as podman knows only what was
submitted on its machine. So if it does not know the attempt, a runner of another machine waits
GIVE_UP_SECONDS for one that knows more.
"""

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from jobs.attempt import GIVE_UP_SECONDS
from jobs.errors import LaunchError, LeaseLost
from jobs.job import Job, outcome_of, start_ticket
from jobs.launcher import EngineStatus, Launcher
from jobs.outcome import JobOutcome
from jobs.process import ProcessIdentity, process_here
from jobs.settings import JobsSettings
from jobs.spec import JOB_TICKET, JOB_URL
from jobs.store import JobStore

logger = logging.getLogger(__name__)

_SECONDS_AFTER_ERROR = 1.0
_MAX_CALLS = 4
"""How many commands of engines run at once. Each may take some seconds."""
_MAX_SUBMITTING = 4 * _MAX_CALLS
_ENDING_SECONDS = 10.0
"""How long an agent may need to exit after its attempt has ended."""


class Engines:
    """All its methods return at once: the commands of engines run in threads.

    `record` records the outcome of an attempt. `Runner` explains the other arguments.
    """

    def __init__(
        self,
        store: JobStore,
        settings: JobsSettings,
        launchers: Mapping[str, Launcher],
        *,
        hub_url: str,
        secret_key: bytes | None,
        record: Callable[[Job, JobOutcome], None],
    ) -> None:
        self._store = store
        self._settings = settings
        self._launchers = launchers
        self._hub_url = hub_url
        self._secret_key = secret_key
        self._record = record
        self._calls = ThreadPoolExecutor(_MAX_CALLS, "engine")
        self._running: dict[str | None, Job] = {}
        """The attempts that have a launcher, of all runners."""
        self._submitting: dict[str, tuple[Job, Future[None]]] = {}
        self._asked: dict[str | None, Future[EngineStatus]] = {}
        """All three by the owners of the attempts."""

    def close(self) -> None:
        self._calls.shutdown()

    @property
    def may_submit(self) -> bool:
        return len(self._submitting) < _MAX_SUBMITTING

    def look(self, running: Sequence[Job]) -> None:
        """Take note of the attempts that have a launcher and run now: cancel those that nobody has
        begun, if somebody asked for it, and clear away what is left of those that have ended."""
        for job in running:
            if job.cancel_requested and job.handle is None:
                self._cancel_queued(job)
        before, self._running = self._running, {job.owner: job for job in running}
        for owner in before.keys() - self._running.keys():
            self._clear_away(before[owner])
        if self._asked:
            # An answer is old if the agent has extended its lease since the question.
            late = {job.owner for job in self._store.expired()}
            self._asked = {owner: each for owner, each in self._asked.items() if owner in late}

    def submit(self, job: Job) -> None:
        """Begin to submit the attempt. Raises LaunchError if there is no such launcher."""
        assert job.owner is not None
        launcher = self._launchers.get(job.spec.launcher)
        if launcher is None or self._secret_key is None:
            raise LaunchError(
                f"this runner has no launcher {job.spec.launcher!r}; add a table "
                f"[launchers.{job.spec.launcher}] to its settings"
            )
        hub_url = launcher.settings.hub_url or self._hub_url
        environment = {
            JOB_URL: f"{hub_url.rstrip('/')}/api/jobs/{job.id}/attempts/{job.attempt}",
            JOB_TICKET: start_ticket(job, self._secret_key),
        }
        submission = self._calls.submit(
            launcher.submit, _name_of_attempt(job), environment, job.spec.resources
        )
        self._submitting[job.owner] = (job, submission)

    def check_submissions(self) -> None:
        """End the attempts that their engines have refused."""
        for owner, (job, submission) in list(self._submitting.items()):
            if submission.done():
                del self._submitting[owner]
                if (error := submission.exception()) is not None:
                    # The engine may be away only now.
                    reason = f"{job.id} could not start: {error}"
                    failed = outcome_of(job, "failed", stage="launch", reason=reason, may_pass=True)
                    self._record(job, failed)

    def end_if_gone(self, job: Job) -> None:
        """Decide about an attempt whose lease has run out, once its engine has answered. Until
        then, this does nothing, and is called again."""
        assert job.owner is not None
        if job.owner in self._submitting:
            return
        launcher = self._launchers.get(job.spec.launcher)
        status, is_silent = EngineStatus("unknown", "this runner has no such launcher"), False
        if launcher is not None:
            if job.owner not in self._asked:
                asking = self._calls.submit(launcher.status, _name_of_attempt(job))
                self._asked[job.owner] = asking
            if not self._asked[job.owner].done():
                return
            try:
                status = self._asked.pop(job.owner).result()
            except LaunchError as error:
                logger.warning("Job %s: %s; asking again", job.id, error)
                status, is_silent = EngineStatus("unknown", str(error)), True
        assert job.lease_until is not None
        has_it = status.state in ("queued", "running")
        if has_it and job.handle is None:
            with contextlib.suppress(LeaseLost):  # ended meanwhile
                lease_seconds = self._settings.lease_seconds
                self._store.heartbeat(job.id, job.owner, lease_seconds, is_queued=True)
            return
        is_unknown = status.state == "unknown"
        may_have_it = has_it or is_silent or (is_unknown and runner_here(job) is None)
        # The agent may only be cut off, and tries to reach its hub for as long.
        if may_have_it and self._store.now() < job.lease_until + GIVE_UP_SECONDS:
            return
        what = "began" if job.handle is None else "went on"
        reason = f"No agent {what} on {job.spec.launcher}: {status.state} ({status.told})."
        stage = "launch" if job.handle is None else "lost"
        failed = outcome_of(job, "failed", stage=stage, reason=reason, may_pass=True)
        self._record(job, failed)

    def _cancel_queued(self, job: Job) -> None:
        """Cancel an attempt that no agent has begun."""
        assert job.owner is not None
        with contextlib.suppress(LeaseLost):  # an agent has begun it meanwhile
            self._store.hand_back(job.id, job.owner, only_unbegun=True)
            logger.info("Job %s is cancelled before its agent has begun.", job.id)

    def _clear_away(self, job: Job) -> None:
        """Leave nothing of an attempt that has ended: neither in the engine's queue nor, for
        example, a container that has ended."""
        if (launcher := self._launchers.get(job.spec.launcher)) is not None:
            self._calls.submit(_clear_away, launcher, _name_of_attempt(job))


def _clear_away(launcher: Launcher, name: str) -> None:
    give_up = time.monotonic() + _ENDING_SECONDS
    try:
        # The agent that has told of the end may still remove its files.
        while launcher.status(name).state == "running" and time.monotonic() < give_up:
            time.sleep(_SECONDS_AFTER_ERROR)
        launcher.cancel(name)
    except LaunchError as error:
        # An agent that starts in spite of this may not begin, because the attempt has ended.
        logger.warning("%s", error)


def runner_here(job: Job) -> ProcessIdentity | None:
    """The runner that has started the attempt. None if it is a process of another machine."""
    name, _, number = (job.owner or "").rpartition("/")
    return process_here(name) if name and number else None


def _name_of_attempt(job: Job) -> str:
    """By which an engine knows the attempt. The store of another stack may have a job of the same
    id, but none of the same time."""
    store = hashlib.sha256(f"{job.id} {job.created_at}".encode()).hexdigest()[:8]
    return f"hotpush-{job.id}-{job.attempt}-{store}"
