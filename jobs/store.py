"""`JobStore`: all jobs with their states, and the deliveries that led to them.

The store starts no process; `jobs/runner.py` takes jobs from the store, and `jobs/agent.py` runs
them.

A *push job* belongs to a pipeline and was not submitted by hand. The docstring of the package
`jobs` explains the other terms, such as "plain command" and "lost".
"""

import time
from collections.abc import Callable, Collection, Generator, Sequence
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, delete, func, insert, select, text, update

from jobs.database import connect, locked, reading, watch, writing
from jobs.errors import JobNotFound, LeaseLost, StoreError
from jobs.job import OPEN_STATES, Delivery, FindHead, Job, JobRequest, JobState, outcome_of
from jobs.outcome import JobOutcome
from jobs.queue import (
    claim_job,
    final_failure,
    forget_jobs,
    give_way,
    is_claimable,
    is_waiting,
    submit_all,
)
from jobs.schema import (
    DELIVERIES,
    JOBS,
    METADATA,
    PAUSES,
    SCHEMA_REVISION,
    end_job,
    fetch_job,
    fetch_leased,
    is_paused,
    is_unhandled,
    job_id_of,
    number_of,
    select_jobs,
    update_job,
)
from jobs.spec import JobSpec


class JobStore:
    """Several threads and processes may use the store at the same time. Every method raises
    StoreError if the database fails.

    A method that fails has changed nothing, because each method is one transaction. There are two
    exceptions. `forget` and `replace_reasons` use several transactions, so they may have done a
    part of their work when they fail. And if the connection to Postgres breaks during a commit, the
    method raises StoreError, but the change may be stored.

    All times are seconds since the epoch. `clock` returns the present time. Default: the clock that
    `open` describes.
    """

    def __init__(self, engine: Engine, clock: Callable[[], float] | None = None) -> None:
        self._engine = engine
        self._clock = clock
        self._changes: Generator[bool] | None = None

    @classmethod
    def open(cls, url_or_path: str | Path, *, clock: Callable[[], float] | None = None) -> Self:
        """Open the store. Create its tables if necessary. Raises OtherSchema if another version of
        hotpush wrote the store.

        `clock` returns seconds since the epoch. Without a `clock`, a SQLite store uses the clock of
        this machine. A Postgres store uses the clock of the Postgres server, because the machines
        that use this server may have different clocks.
        """
        return cls(connect(url_or_path, METADATA, SCHEMA_REVISION), clock)

    def close(self) -> None:
        if self._changes is not None:
            self._changes.close()
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def location(self) -> str:
        """The argument with which `open` opens this store again: the path of a SQLite file, or the
        URL of a Postgres database, with its password."""
        url = self._engine.url
        is_file = url.get_backend_name() == "sqlite" and url.database is not None
        return str(url.database) if is_file else url.render_as_string(hide_password=False)

    @property
    def driver(self) -> str:
        """The module for this kind of database, whose import takes a while."""
        return str(self._engine.dialect.loaded_dbapi.__name__)

    # Reading

    def get(self, job_id: str) -> Job:
        """The job with this id. Raises JobNotFound."""
        with reading(self._engine) as connection:
            return fetch_job(connection, number_of(job_id))

    def unhandled(self) -> Sequence[Job]:
        """The ended jobs for which `handled` was not called, and which nobody has taken now
        (`take_outcome`), earliest end first."""
        with reading(self._engine) as connection:
            query = select(JOBS).where(is_unhandled(self._now(connection)))
            return select_jobs(connection, query.order_by(JOBS.c.ended_at, JOBS.c.number))

    def paused(self) -> dict[str, float]:
        """The paused pipelines: name → when the pause began."""
        with reading(self._engine) as connection:
            return {row.pipeline: row.since for row in connection.execute(select(PAUSES))}

    def has_open_jobs(self) -> bool:
        """Whether any job has not ended. Pending push jobs of paused pipelines do not count."""
        unended = select(JOBS.c.number).where(JOBS.c.state.in_(OPEN_STATES))
        waits = (JOBS.c.state == "SCHEDULING") & JOBS.c.pipeline.is_not(None) & is_paused()
        with reading(self._engine) as connection:
            return connection.scalar(unended.where(~waits).limit(1)) is not None

    def ids_ended_before(self, moment: float) -> list[str]:
        """The ids of the jobs that ended before `moment`, in the order of their creation."""
        query = select(JOBS.c.number).where(JOBS.c.ended_at < moment).order_by(JOBS.c.number)
        with reading(self._engine) as connection:
            return [job_id_of(number) for number in connection.scalars(query)]

    def list(
        self,
        pipeline: str | None = None,
        state: JobState | Collection[JobState] | None = None,
        limit: int | None = None,
        *,
        before: str | None = None,
        since: float | None = None,
    ) -> list[Job]:
        """The jobs, newest first. `before` is the id of a job: only older jobs are listed. `since`
        is a time: only jobs that were created at or after it are listed. An argument that is None
        does not limit the list. Raises JobNotFound if `before` is not a job id."""
        query = select(JOBS.c.number).order_by(JOBS.c.number.desc()).limit(limit)
        if pipeline is not None:
            query = query.where(JOBS.c.pipeline == pipeline)
        if state is not None:
            query = query.where(JOBS.c.state.in_([state] if isinstance(state, str) else state))
        if before is not None:
            query = query.where(JOBS.c.number < number_of(before))
        if since is not None:
            query = query.where(JOBS.c.created_at >= since)
        # SQLite would sort whole rows, with their payloads.
        rows = select(JOBS).where(JOBS.c.number.in_(query)).order_by(JOBS.c.number.desc())
        with reading(self._engine) as connection:
            return select_jobs(connection, rows)

    def of_commit(self, new_sha: str) -> Sequence[Job]:
        """The jobs of this commit, newest job first: those that a delivery of this commit led to,
        and those that have trained on exactly this commit. Several pipelines may follow the
        dataset."""
        linked = select(DELIVERIES.c.job_number).where(DELIVERIES.c.announced == new_sha)
        is_of_commit = JOBS.c.number.in_(linked) | (JOBS.c.head == new_sha)
        query = select(JOBS).where(is_of_commit).order_by(JOBS.c.number.desc())
        with reading(self._engine) as connection:
            return select_jobs(connection, query)

    def waited_since(self, job: Job) -> float:
        """When the oldest delivery was received whose commits the job covers: the job's own
        deliveries and, for a push job, those of the jobs that have failed since the pipeline's last
        completed one. If there is no delivery, for example because a person submitted the job,
        returns the time when the job was created."""
        number, columns = number_of(job.id), JOBS.c
        is_before = (columns.pipeline == job.spec.pipeline) & columns.by_hand.is_(False)
        is_before &= columns.number < number
        done = select(func.max(columns.number)).where(is_before, columns.state == "COMPLETED")
        failed = select(columns.number).where(is_before, columns.state == "ERROR")
        oldest = select(func.min(DELIVERIES.c.received_at))
        with reading(self._engine) as connection:
            numbers = [number]
            if not job.by_hand:
                since = connection.scalar(done) or 0
                numbers += connection.scalars(failed.where(columns.number > since))
            received_at: float | None = connection.scalar(
                oldest.where(DELIVERIES.c.job_number.in_(numbers))
            )
        return job.created_at if received_at is None else received_at

    def seconds_to_next(self) -> float | None:
        """The number of seconds until `claim` can return a job; 0 if a job is due now. None if no
        job is pending or waits for its next attempt, or if every pending job must wait until the
        running job of its pipeline, or a pause, has ended."""
        may_come = is_claimable() | is_waiting()
        with reading(self._engine) as connection:
            due = connection.scalar(select(func.min(JOBS.c.run_after)).where(may_come))
            return None if due is None else max(0.0, due - self._now(connection))

    def expired(self) -> Sequence[Job]:
        """The jobs whose lease has run out: the agent of the attempt is dead or frozen, or cannot
        reach the store."""
        with reading(self._engine) as connection:
            has_run_out = JOBS.c.lease_until <= self._now(connection)
            query = select(JOBS).where(JOBS.c.owner.is_not(None), has_run_out)
            return select_jobs(connection, query.order_by(JOBS.c.number))

    def has_changed(self) -> bool:
        """Whether anybody has written to the store since the last call, except heartbeats on
        Postgres; True at the first call, and at the first one after an error. This is cheap enough
        to ask many times a second. Only one thread may ask."""
        self._changes = self._changes or watch(self._engine)
        try:
            return next(self._changes)
        except StoreError:
            self._changes = None
            raise

    def now(self) -> float:
        """The present time by the store's clock, in seconds since the epoch."""
        with reading(self._engine) as connection:
            return self._now(connection)

    def _now(self, connection: Connection) -> float:
        if self._clock is not None:
            return self._clock()
        if connection.dialect.name == "postgresql":
            return float(
                connection.execute(
                    text("SELECT extract(epoch FROM clock_timestamp())")
                ).scalar_one()
            )
        return time.time()

    # Deliveries and submissions

    def submit(
        self,
        spec: JobSpec,
        *,
        payload: dict[str, Any] | None = None,
        delivery: Delivery | None = None,
        by_hand: bool = False,
    ) -> Job:
        """Submit `spec` and record `delivery`, in one transaction. Returns the job to which the
        submission leads, without its delivery ids, because there may be many. The store goes
        through these rules in order, and the first rule that applies decides:

        1. If the store has recorded a job for `delivery`, and this job neither failed nor was
           cancelled, return this job.
        2. If the pipeline has a pending push job, link the delivery to this job, give it
           `spec` and `payload`, and return it.
        3. Create a pending job, and return it.

        The commit in the range of a push job's `spec` is the one that the delivery announced. The
        job does not train on it: the job gets its commit, which is the head of the ref, when a
        runner takes it (`claim`). So the order of deliveries does not matter.

        For a submission by hand (`by_hand`), only rules 1 and 3 apply. Raises PendingJob if the
        pipeline already has a pending job that was submitted by hand.
        """
        request = JobRequest(spec=spec, payload=payload, delivery=delivery, by_hand=by_hand)
        return self.submit_all([request])[0]

    def repeat(self, job_id: str) -> Job:
        """Submit the spec and the payload of this job again, by hand. A job that had read the head
        of its ref trains on the same commit. Returns the new job. Raises JobNotFound and
        PendingJob."""
        job = self.get(job_id)
        return self.submit(job.spec, payload=job.payload, by_hand=True)

    def submit_all(self, requests: Sequence[JobRequest]) -> Sequence[Job]:
        """Submit the requests in order, by the rules of `submit`, in one transaction."""
        with writing(self._engine) as connection:
            return submit_all(connection, requests, self._now(connection))

    # What a runner and an agent do

    def claim(
        self,
        owner: str,
        lease_seconds: float,
        find_head: FindHead | None = None,
        *,
        is_local: bool | None = None,
    ) -> Job | None:
        """Choose a job that is due, and give the lease of its next attempt to `owner`, which must
        be a new name for each attempt. The job is then RUNNING. Jobs that wait for another attempt
        come first, and then the pending job that has been due for the longest time. With
        `is_local`, only a job without a launcher is chosen, or only one with a launcher.

        If a pending job is for the head of a ref, `find_head` reads the head now; without
        `find_head`, the job must read the head itself. In four cases, the job is not RUNNING
        afterwards:

        - The head cannot be read now (HeadAway). The job stays pending for HEAD_RETRY_SECONDS, and
          this method returns None.
        - The ref has no head (NoHead). The job has failed.
        - It is a push job, and the pipeline's newest ended job has trained this head in the same
          way (`job_that_trained`). The job has ended as `unchanged`.
        - An attempt of the job has failed, and a push job of the pipeline is pending, which trains
          on the newest commit. The job has failed.

        Deliveries that arrive while `find_head` reads the head get a new pending job, if the job
        is still due then.

        Returns None if no job is due, or if every due job waits for the running job of its
        pipeline, or for the end of a pause.
        """
        return claim_job(self._engine, self._now, owner, lease_seconds, find_head, is_local)

    def started(self, job_id: str, owner: str, handle: str) -> Job:
        """Record that the attempt begins. `handle` names the agent that runs it. Returns the job.

        An attempt begins only once: raises LeaseLost if another agent has begun it, and if the
        lease is not `owner`'s any more. The caller must then run nothing.
        """
        with writing(self._engine) as connection:
            if fetch_leased(connection, job_id, owner).handle not in (None, handle):
                raise LeaseLost(job_id, owner)
            return update_job(connection, job_id, handle=handle)

    def heartbeat(
        self, job_id: str, owner: str, lease_seconds: float, *, is_queued: bool = False
    ) -> Job:
        """Extend the lease. Returns the job, which says whether somebody asked to cancel it. Raises
        LeaseLost.

        A lease that has run out is extended too, unless a runner has ended the attempt. `is_queued`
        says that the attempt waits in the queue of an engine, so this time does not count against
        the job's time limit.
        """
        with locked(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            values: dict[str, float] = {"lease_until": self._now(connection) + lease_seconds}
            if is_queued and job.started_at is not None and job.lease_until is not None:
                values["started_at"] = job.started_at + values["lease_until"] - job.lease_until
            return update_job(connection, job_id, **values)

    def finish(self, job_id: str, owner: str, outcome: JobOutcome | None) -> Job:
        """End the job. An `outcome` of None means that the command exited with 0 and wrote no
        outcome. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            return end_job(connection, job, outcome, self._now(connection))

    def retry(self, job_id: str, owner: str, failed: JobOutcome, wait_seconds: float = 0.0) -> Job:
        """End an attempt that was lost or failed for a temporary cause. `failed` is the outcome of
        this attempt. `claim` may give out the next attempt after `wait_seconds`.

        In three cases, the job gets no further attempt and ends: somebody asked to cancel it,
        `max_attempts` attempts were lost or failed for a temporary cause, or a push job of the
        pipeline is pending, which trains on the newest commit. Returns the job, which is RUNNING or
        has ended. Raises LeaseLost.
        """
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            now = self._now(connection)
            job = update_job(connection, job_id, num_lost=job.num_lost + 1)
            if job.cancel_requested:
                return end_job(connection, job, _cancelled(job, failed), now)
            if (ended := give_way(connection, job, failed, now)) is not None:
                return ended
            if job.num_lost >= job.spec.max_attempts:
                # Count the failed attempts only. An attempt that ended because its runner was
                # stopped has a number too, but it did not fail.
                last = f"That was failed attempt {job.num_lost} of {job.spec.max_attempts}."
                return end_job(connection, job, final_failure(failed, last), now)
            values = {"outcome": failed.model_dump_json(), "run_after": now + wait_seconds}
            return _end_attempt(connection, job, now, **values)

    def hand_back(self, job_id: str, owner: str, *, only_unbegun: bool = False) -> Job:
        """End an attempt that does not count, so that `claim` gives out the next attempt at once.
        Returns the job. Raises LeaseLost; with `only_unbegun`, also if the attempt has begun."""
        with writing(self._engine) as connection:
            job = fetch_leased(connection, job_id, owner)
            if only_unbegun and job.handle is not None:
                raise LeaseLost(job_id, owner)
            now = self._now(connection)
            if job.cancel_requested:
                return end_job(connection, job, _cancelled(job, None), now)
            return _end_attempt(connection, job, now, run_after=now)

    def take_outcome(self, job_id: str, seconds: float) -> bool:
        """For so many seconds, let only the caller handle the outcome of this job. False if another
        runner was faster."""
        with locked(self._engine) as connection:
            now = self._now(connection)
            is_free = JOBS.c.number == number_of(job_id), is_unhandled(now)
            taken = update(JOBS).where(*is_free).values(lease_until=now + seconds)
            return connection.execute(taken).rowcount > 0

    def handled(self, job_id: str) -> None:
        """Record that the handlers of outcomes have got the outcome of this job, so that
        `unhandled` leaves the job out."""
        with writing(self._engine) as connection:
            update_job(connection, job_id, handled_at=self._now(connection))

    # Deleting old jobs and reasons

    def forget(self, before: float, kept: Collection[str] = ()) -> Sequence[str]:
        """Delete the jobs that ended earlier than the time `before`, and the deliveries of these
        jobs. Returns the ids of the deleted jobs.

        The jobs that a caller on any machine has named in `kept` within the last KEPT_SECONDS are
        not deleted. If a sender repeats a deleted delivery, the delivery counts as new.
        """
        return forget_jobs(self._engine, self._now, before, kept)

    def replace_reasons(self, job_ids: Collection[str], reason: str) -> None:
        """Replace the reasons in the outcomes of these jobs. Call this when rows of a dataset must
        be deleted everywhere: the reason of a job may quote such rows. An outcome without a reason
        does not change, and an unknown job id is skipped."""
        for job_id in job_ids:
            with writing(self._engine) as connection:
                try:
                    job = fetch_job(connection, number_of(job_id))
                except JobNotFound:
                    continue
                if job.outcome is not None and job.outcome.reason is not None:
                    outcome = job.outcome.model_copy(update={"reason": reason})
                    update_job(connection, job_id, outcome=outcome.model_dump_json())

    # What a person does

    def pause(self, pipeline: str) -> bool:
        """Start no push job of this pipeline until `resume` is called. Returns False if the
        pipeline was paused already."""
        with writing(self._engine) as connection:
            if connection.scalar(select(PAUSES).where(PAUSES.c.pipeline == pipeline)) is not None:
                return False
            values = {"pipeline": pipeline, "since": self._now(connection)}
            connection.execute(insert(PAUSES).values(**values))
            return True

    def resume(self, pipeline: str) -> bool:
        """End a pause. Returns False if the pipeline was not paused."""
        with writing(self._engine) as connection:
            ended = connection.execute(delete(PAUSES).where(PAUSES.c.pipeline == pipeline))
            return ended.rowcount > 0

    def cancel(self, job_id: str) -> Job:
        """Cancel the job. If the job is pending or waits for its next attempt, end it. If an
        attempt is running, ask its agent to stop. If the job has already ended, change nothing.

        Raises JobNotFound.
        """
        with writing(self._engine) as connection:
            job = fetch_job(connection, number_of(job_id))
            match job.state:
                case "SCHEDULING":
                    reason = "Cancelled before it was started."
                    outcome = outcome_of(job, "cancelled", reason=reason)
                    return end_job(connection, job, outcome, self._now(connection))
                case "RUNNING" if job.owner is None:
                    outcome = _cancelled(job, job.last_failure)
                    return end_job(connection, job, outcome, self._now(connection))
                case "RUNNING":
                    return update_job(connection, job_id, cancel_requested=True)
                case _:
                    return job


def _end_attempt(connection: Connection, job: Job, now: float, **values: Any) -> Job:
    """The next attempt gets its number, and with it its token, now: nobody may use the token of
    this attempt any more."""
    assert job.lease_until is not None
    return update_job(
        connection,
        job.id,
        attempt=job.attempt + 1,
        owner=None,
        handle=None,
        # If the lease has run out, the job has had no agent since then.
        lease_until=min(now, job.lease_until),
        **values,
    )


def _cancelled(job: Job, failed: JobOutcome | None) -> JobOutcome:
    reason = "Cancelled while it waited for another attempt."
    if failed is None:
        return outcome_of(job, "cancelled", reason=reason)
    reason = f"{reason} {failed.reason}"
    return outcome_of(job, "cancelled", stage=failed.stage, reason=reason)
