"""Decides which job each submission leads to, within one transaction of `jobs/store.py`.

A *push job* belongs to a pipeline and was not submitted by hand. A pending push job may *absorb*
many submissions of one transaction: the job then covers the commits of these submissions too. To
save time, the job's row is written only once, at the end of the transaction.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, Select, insert, select, update

from jobs.errors import JobNotFound, PendingJob
from jobs.job import OPEN_STATES, Delivery, Job, JobRequest, JobState, Submission
from jobs.rows import (
    DeliveryLink,
    due_at,
    is_pending,
    job_from_row,
    job_id_of,
    link_deliveries,
    matches_delivery,
    merge_specs,
    newest_commit,
    number_of,
    spec_as_json,
)
from jobs.schema import DELIVERIES, JOB_DELIVERIES, JOBS
from jobs.spec import JobSpec

DeliveryKey = tuple[str, str]
"""A delivery's source and id."""

_FAILED_OR_CANCELLED: tuple[JobState, ...] = ("ERROR", "CANCELED")
"""A job in one of these states has not done its work. So if a delivery of this job is repeated, the
delivery may lead to another job."""


def submit_all(
    connection: Connection, requests: Sequence[JobRequest], now: float
) -> list[Submission]:
    """Submit the requests in order, by the rules of `JobStore.submit`. Raises PendingJob if a
    request is by hand, and the pipeline already has a pending job that was submitted by hand."""
    batch = _Batch(connection, now)
    known = _known_deliveries(connection, requests)
    answered: dict[DeliveryKey, tuple[Delivery, int]] = {}
    submissions = []
    for request in requests:
        delivery = request.delivery
        if delivery is None:
            submissions.append(batch.submit(request))
            continue
        key = delivery.source, delivery.id
        number = answered[key][1] if key in answered else known.get(key)
        answer = None if number is None else batch.answer(number)
        if answer is not None:
            submission = Submission(job=answer, is_new=False, how="duplicate")
        else:
            submission = batch.submit(request)
        if number != number_of(submission.job.id):
            answered[key] = delivery, number_of(submission.job.id)
        submissions.append(submission)
    batch.write()
    _write_answers(connection, answered, known, now)
    return submissions


def _known_deliveries(
    connection: Connection, requests: Sequence[JobRequest]
) -> Mapping[DeliveryKey, int | None]:
    """The deliveries of these requests that the store has already recorded: key of the delivery →
    number of its job. The number is None for a delivery that was ignored."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for request in requests:
        if request.delivery is not None:
            ids[request.delivery.source].append(request.delivery.id)
    known = {}
    # Use one query per source. With a list of (source, id) pairs, SQLite would not use the index
    # and would compare every row.
    for source in ids:
        query = select(DELIVERIES.c.id, DELIVERIES.c.job_number)
        is_asked = DELIVERIES.c.source == source, DELIVERIES.c.id.in_(ids[source])
        for row in connection.execute(query.where(*is_asked)):
            known[source, row.id] = row.job_number
    return known


def _write_answers(
    connection: Connection,
    answered: Mapping[DeliveryKey, tuple[Delivery, int]],
    known: Mapping[DeliveryKey, int | None],
    now: float,
) -> None:
    new = [
        {
            "source": delivery.source,
            "id": delivery.id,
            "body": delivery.body,
            "received_at": now,
            "job_number": number,
        }
        for key, (delivery, number) in answered.items()
        if key not in known
    ]
    if new:
        connection.execute(insert(DELIVERIES), new)
    # The rest of the deliveries are already recorded, but with an answer that is no longer right:
    # the delivery was ignored, or the recorded job failed or was cancelled.
    for key in answered.keys() & known.keys():
        answer = update(DELIVERIES).where(*matches_delivery(*key))
        connection.execute(answer.values(job_number=answered[key][1], ignored_reason=None))


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """The job with which the next submission is compared. The comparison has one of three results:
    the submission is a duplicate of this job, this job absorbs the submission, or the submission
    gets a new job.

    For a pipeline, the candidate is the pending push job or, if no push job is pending, the newest
    job of the pipeline. For a plain command, the candidate is the newest plain command with the
    same dedupe key.
    """

    job: Job
    dedupe_key: str | None


class _Batch:
    """The submissions of one transaction. New jobs are inserted at once. Changes to jobs that
    already exist, and the links between jobs and deliveries, are kept in memory until `write` is
    called."""

    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._candidates: dict[str, _Candidate | None] = {}
        self._changed: set[str] = set()
        self._links: list[DeliveryLink] = []

    def submit(self, request: JobRequest) -> Submission:
        submission = self._submit(request)
        spec, delivery = request.spec, request.delivery
        # Only a pending job takes more deliveries, because a job that has started has already read
        # its spec.
        if spec.revisions is not None and submission.job.state == "SCHEDULING":
            own = () if delivery is None else (delivery.id,)
            self._links += [
                DeliveryLink(
                    job_number=number_of(submission.job.id),
                    delivery_id=delivery_id,
                    new_sha=spec.revisions.new_sha,
                )
                for delivery_id in (*spec.revisions.delivery_ids, *own)
            ]
        return submission

    def _submit(self, request: JobRequest) -> Submission:
        if request.by_hand:
            return self._submit_by_hand(request)
        spec = request.spec
        if spec.pipeline is None:
            candidate = self._same_command(spec)
        else:
            candidate = self._candidate_of(spec.pipeline)
        if (
            # Compare the submission only with the candidate, never with older jobs. Suppose that
            # somebody pushes the commits A, B and again A. The job of the first push then has the
            # same key as the third push. But the third push needs a new training, because the
            # weights have learned B since the first push.
            candidate is not None
            and spec.dedupe_key is not None
            and candidate.dedupe_key == spec.dedupe_key
            and not _failed_or_cancelled(candidate.job)
        ):
            return Submission(job=candidate.job, is_new=False, how="duplicate")
        if (
            spec.pipeline is None
            or candidate is None
            or candidate.job.state != "SCHEDULING"
            or candidate.job.by_hand
        ):
            job = self._insert(request)
            self._remember(spec.pipeline, _Candidate(job=job, dedupe_key=spec.dedupe_key))
            return Submission(job=job, is_new=True, how="created")
        merged = self._merge(candidate, spec, request.payload)
        self._remember(spec.pipeline, merged, is_changed=True)
        return Submission(job=merged.job, is_new=False, how="merged")

    def _submit_by_hand(self, request: JobRequest) -> Submission:
        pipeline = request.spec.pipeline
        if pipeline is not None:
            query = select(JOBS.c.number).where(is_pending(pipeline, by_hand=True))
            number = self._connection.scalar(query)
            if number is not None:
                raise PendingJob(job_id_of(number), pipeline)
            # The remembered candidate is a pending push job, or else the newest job of the
            # pipeline. The job that is inserted below will be the newest job. So if the candidate
            # is not pending, forget it: `_candidate_of` then reads the new job from the database.
            candidate = self._candidates.get(pipeline)
            if candidate is not None and candidate.job.state != "SCHEDULING":
                del self._candidates[pipeline]
        return Submission(job=self._insert(request), is_new=True, how="created")

    def answer(self, number: int) -> Job | None:
        """Find the job to return for a repeated delivery. `number` is the number of the job that is
        recorded for the delivery. Returns None if the delivery must be submitted like a new
        delivery.

        Normally returns the job `number`. But if that job failed or was cancelled, returns a later
        push job of the same pipeline: the newest one that did not fail and was not cancelled. This
        later job trains on a newer commit. A new job for the repeated delivery would train on the
        older commit, and the weights of the new job would replace the newer weights. If there is no
        such later job, returns None. Also returns None for a plain command that failed or was
        cancelled, because no other job does the work of the command.
        """
        job = self.job(number)
        if not _failed_or_cancelled(job):
            return job
        if job.spec.pipeline is None:
            return None
        later = (
            select(JOBS.c.number)
            .where(
                JOBS.c.pipeline == job.spec.pipeline,
                JOBS.c.number > number,
                JOBS.c.by_hand.is_(False),
                # The same rule as in `_failed_or_cancelled`.
                (JOBS.c.state == "COMPLETED")
                | JOBS.c.state.in_(OPEN_STATES) & JOBS.c.cancel_requested.is_(False),
            )
            .order_by(JOBS.c.number.desc())
            .limit(1)
        )
        newest = self._connection.scalar(later)
        return None if newest is None else self.job(newest)

    def job(self, number: int) -> Job:
        """The job, with the changes that this batch has made so far."""
        for candidate in self._candidates.values():
            if candidate is not None and number_of(candidate.job.id) == number:
                return candidate.job
        row = self._connection.execute(select(JOBS).where(JOBS.c.number == number)).one_or_none()
        if row is None:
            raise JobNotFound(job_id_of(number))
        return job_from_row(row)

    def write(self) -> None:
        for pipeline in self._changed:
            changed = self._candidates[pipeline]
            assert changed is not None
            self._connection.execute(
                update(JOBS)
                .where(JOBS.c.number == number_of(changed.job.id))
                .values(
                    spec=spec_as_json(changed.job.spec),
                    run_after=changed.job.run_after,
                    payload=_as_json(changed.job.payload),
                    dedupe_key=changed.dedupe_key,
                )
            )
        link_deliveries(self._connection, self._links, self._now)

    def _candidate_of(self, pipeline: str) -> _Candidate | None:
        if pipeline not in self._candidates:
            pending = select(JOBS).where(is_pending(pipeline, by_hand=False))
            of_pipeline = select(JOBS).where(JOBS.c.pipeline == pipeline)
            self._candidates[pipeline] = self._newest(pending) or self._newest(of_pipeline)
        return self._candidates[pipeline]

    def _same_command(self, spec: JobSpec) -> _Candidate | None:
        """The newest plain command with the dedupe key of `spec`. Jobs of pipelines are left out,
        because they may have the same key by chance."""
        if spec.dedupe_key is None:
            return None
        return self._newest(
            select(JOBS).where(JOBS.c.pipeline.is_(None), JOBS.c.dedupe_key == spec.dedupe_key)
        )

    def _newest(self, query: Select[Any]) -> _Candidate | None:
        row = self._connection.execute(query.order_by(JOBS.c.number.desc()).limit(1)).one_or_none()
        return None if row is None else _Candidate(job=job_from_row(row), dedupe_key=row.dedupe_key)

    def _merge(
        self, pending: _Candidate, spec: JobSpec, payload: dict[str, Any] | None
    ) -> _Candidate:
        merged = merge_specs(pending.job.spec, spec)
        arrived_late = newest_commit(merged) != newest_commit(spec)
        if arrived_late and self._answers_for_an_old_delivery(pending.job):
            merged = merge_specs(pending.job.spec, spec, may_be_older=False)
        run_after = due_at(merged, pending.job.created_at, self._now)
        job = replace(pending.job, spec=merged, run_after=run_after)
        if newest_commit(merged) != newest_commit(spec):
            # The commits of `spec` are older and arrived late. So keep the payload and the dedupe
            # key of the pending job, which belong to the newest commit.
            return replace(pending, job=job)
        return _Candidate(job=replace(job, payload=payload), dedupe_key=spec.dedupe_key)

    def _answers_for_an_old_delivery(self, pending: Job) -> bool:
        """Whether the pending job answers for an old delivery. A delivery is old if it is linked
        not only to the pending job but also to an earlier job of the pipeline. A delivery becomes
        old when the sender repeats it, or when the pending job takes it over from a failed job.

        The answer matters for a push that ends at the commit where the range of the pending job
        begins. Normally, such a push is older than the range, and has only arrived late. But if the
        pending job answers for an old delivery, the push is newer than that delivery, so it has not
        arrived late: somebody has force-pushed the branch back to this commit.
        """
        number = number_of(pending.id)
        links = JOB_DELIVERIES.c
        own = select(links.delivery_id).where(links.job_number == number)
        not_written = [link.delivery_id for link in self._links if link.job_number == number]
        # Look only at jobs of this pipeline. If another pipeline follows the same dataset, the jobs
        # of that pipeline answer for the same deliveries.
        same_pipeline = JOBS.c.pipeline == pending.spec.pipeline
        earlier_jobs = JOB_DELIVERIES.join(JOBS, JOBS.c.number == links.job_number)
        earlier = select(links.job_number).select_from(earlier_jobs)
        earlier = earlier.where(
            links.job_number < number,
            same_pipeline,
            links.delivery_id.in_(own) | links.delivery_id.in_(not_written),
        )
        return self._connection.scalar(earlier.limit(1)) is not None

    def _insert(self, request: JobRequest) -> Job:
        spec = request.spec
        row = self._connection.execute(
            insert(JOBS)
            .values(
                pipeline=spec.pipeline,
                state="SCHEDULING",
                spec=spec_as_json(spec),
                payload=_as_json(request.payload),
                dedupe_key=spec.dedupe_key,
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

    def _remember(
        self, pipeline: str | None, candidate: _Candidate, *, is_changed: bool = False
    ) -> None:
        if pipeline is not None:
            self._candidates[pipeline] = candidate
            if is_changed:
                self._changed.add(pipeline)


def _failed_or_cancelled(job: Job) -> bool:
    """Whether the job failed, was cancelled, or still runs but will be cancelled. If the sender
    repeats a delivery of such a job, the delivery may lead to another job. A job that completed
    before it could be cancelled does not count as cancelled, because it has done its work."""
    return job.state in _FAILED_OR_CANCELLED or (job.cancel_requested and not job.has_ended)


def _as_json(payload: dict[str, Any] | None) -> str | None:
    return None if payload is None else json.dumps(payload)
