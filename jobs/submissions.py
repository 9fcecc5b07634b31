"""Decides which job each submission leads to, within one transaction of `jobs/store.py`.

A *push job* belongs to a pipeline and was not submitted by hand. It trains the head of its ref. So
a delivery only marks the pipeline as behind: it is linked to the pipeline's pending push job, and
the order in which deliveries arrive does not matter.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, func, insert, select, update

from jobs.errors import JobNotFound, PendingJob
from jobs.job import Delivery, Job, JobRequest, Submission
from jobs.rows import (
    is_pending,
    job_from_row,
    job_id_of,
    matches_delivery,
    number_of,
    spec_as_json,
    with_revisions,
)
from jobs.schema import DELIVERIES, JOBS
from jobs.spec import JobSpec

DeliveryKey = tuple[str, str]
"""A delivery's source and id."""


def submit_all(
    connection: Connection, requests: Sequence[JobRequest], now: float
) -> list[Submission]:
    """Submit the requests in order, by the rules of `JobStore.submit`. Raises PendingJob if a
    request is by hand, and the pipeline already has a pending job that was submitted by hand."""
    batch = _Batch(connection, now)
    known = _known_deliveries(connection, [each.delivery for each in requests if each.delivery])
    answers = dict(known)
    new: dict[DeliveryKey, dict[str, Any]] = {}
    submissions = []
    for request in requests:
        delivery = request.delivery
        if delivery is None:
            submissions.append(batch.submit(request))
            continue
        key = delivery.source, delivery.id
        job = batch.job(answers[key]) if key in answers else None
        if job is not None and not _failed_or_cancelled(job):
            submissions.append(Submission(job=job, is_new=False, how="duplicate"))
            continue
        submissions.append(batch.submit(request))
        answers[key] = number_of(submissions[-1].job.id)
        if key not in known:
            revisions = request.spec.revisions
            new[key] = {
                "source": delivery.source,
                "id": delivery.id,
                "announced": None if revisions is None else revisions.new_sha,
                "received_at": now,
                "job_number": answers[key],
            }
    batch.write()
    if new:
        arrived = connection.scalar(select(func.max(DELIVERIES.c.arrival))) or 0
        rows = [{**row, "arrival": at} for at, row in enumerate(new.values(), start=arrived + 1)]
        connection.execute(insert(DELIVERIES), rows)
    # The recorded job failed or was cancelled.
    for key in [key for key in known if answers[key] != known[key]]:
        answer = update(DELIVERIES).where(*matches_delivery(*key))
        connection.execute(answer.values(job_number=answers[key]))
    return submissions


def due_at(spec: JobSpec, first_seen: float, now: float) -> float:
    """When a pending job may start. Its first delivery arrived at the time `first_seen`, and its
    last one at the time `now`. All times are seconds since the epoch."""
    return min(first_seen + spec.max_wait_seconds, now + spec.debounce_seconds)


def _known_deliveries(
    connection: Connection, deliveries: Sequence[Delivery]
) -> Mapping[DeliveryKey, int]:
    """The deliveries that the store has already recorded: key of the delivery → number of its
    job."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for delivery in deliveries:
        ids[delivery.source].append(delivery.id)
    known = {}
    # Use one query per source. With a list of (source, id) pairs, SQLite would not use the index
    # and would compare every row.
    for source in ids:
        query = select(DELIVERIES.c.id, DELIVERIES.c.job_number)
        is_asked = DELIVERIES.c.source == source, DELIVERIES.c.id.in_(ids[source])
        for row in connection.execute(query.where(*is_asked)):
            known[source, row.id] = row.job_number
    return known


class _Batch:
    """The submissions of one transaction. New jobs are inserted at once. A changed pending job is
    written only once, by `write`, because one transaction may have many deliveries for it."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._pending: dict[str, Job | None] = {}
        """Pipeline → its pending push job, with the changes that are not written yet."""
        self._changed: set[str] = set()

    def submit(self, request: JobRequest) -> Submission:
        spec = request.spec
        pipeline = spec.pipeline
        if pipeline is None or request.by_hand:
            if pipeline is not None:
                query = select(JOBS.c.number).where(is_pending(pipeline, by_hand=True))
                if (number := self._connection.scalar(query)) is not None:
                    raise PendingJob(job_id_of(number), pipeline)
            return Submission(job=self._insert(request), is_new=True, how="created")
        spec = with_revisions(spec, old_sha=None, new_sha=None, delivery_ids=())
        pending = self._pending_job(pipeline)
        if pending is None:
            job = self._pending[pipeline] = self._insert(replace(request, spec=spec))
            return Submission(job=job, is_new=True, how="created")
        if spec.revisions is None:
            spec = spec.model_copy(update={"revisions": pending.spec.revisions})
        run_after = due_at(spec, pending.created_at, self._now)
        job = replace(pending, spec=spec, payload=request.payload, run_after=run_after)
        self._pending[pipeline] = job
        self._changed.add(pipeline)
        return Submission(job=job, is_new=False, how="merged")

    def job(self, number: int) -> Job:
        """The job, with the changes that this batch has made so far."""
        for job in self._pending.values():
            if job is not None and number_of(job.id) == number:
                return job
        row = self._connection.execute(select(JOBS).where(JOBS.c.number == number)).one_or_none()
        if row is None:
            raise JobNotFound(job_id_of(number))
        return job_from_row(row)

    def write(self) -> None:
        for pipeline in self._changed:
            job = self._pending[pipeline]
            assert job is not None
            self._connection.execute(
                update(JOBS)
                .where(JOBS.c.number == number_of(job.id))
                .values(
                    spec=spec_as_json(job.spec),
                    run_after=job.run_after,
                    payload=_as_json(job.payload),
                )
            )

    def _pending_job(self, pipeline: str) -> Job | None:
        if pipeline not in self._pending:
            query = select(JOBS).where(is_pending(pipeline, by_hand=False))
            row = self._connection.execute(query).one_or_none()
            self._pending[pipeline] = None if row is None else job_from_row(row)
        return self._pending[pipeline]

    def _insert(self, request: JobRequest) -> Job:
        spec = request.spec
        row = self._connection.execute(
            insert(JOBS)
            .values(
                pipeline=spec.pipeline,
                head=None if spec.revisions is None else spec.revisions.new_sha,
                state="SCHEDULING",
                spec=spec_as_json(spec),
                payload=_as_json(request.payload),
                created_at=self._now,
                run_after=due_at(spec, self._now, self._now),
                attempt=0,
                num_lost=0,
                cancel_requested=False,
                by_hand=request.by_hand,
            )
            .returning(*JOBS.c)
        ).one()
        return job_from_row(row)


def _failed_or_cancelled(job: Job) -> bool:
    """Whether the job failed, was cancelled, or still runs but will be cancelled. If the sender
    repeats a delivery of such a job, the pipeline is behind again. A job that completed before it
    could be cancelled does not count as cancelled, because it has done its work."""
    return job.state in ("ERROR", "CANCELED") or (job.cancel_requested and not job.has_ended)


def _as_json(payload: dict[str, Any] | None) -> str | None:
    return None if payload is None else json.dumps(payload)
