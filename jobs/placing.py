"""Which job each submission leads to, within one transaction of `jobs/store.py`.

However many submissions there are, a pipeline's row is read once and written once.
"""

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import Connection, insert, select, update

from jobs.errors import JobNotFound, PendingJob
from jobs.record import Delivery, Job, JobRequest, Submission
from jobs.rows import (
    due_at,
    is_delivery,
    job_id_of,
    joined,
    name_deliveries,
    newest_commit,
    number_of,
    record,
    spec_as_json,
)
from jobs.schema import DELIVERIES, JOBS
from jobs.spec import JobSpec

Key = tuple[str, str]
"""A delivery's source and id."""


def place_all(
    connection: Connection, requests: Sequence[JobRequest], now: float
) -> list[Submission]:
    """What `JobStore.submit` says of one, for each in turn. Raises PendingJob."""
    placing = _Placing(connection, now)
    seen = _seen(connection, requests)
    told: dict[Key, tuple[Delivery, int]] = {}
    submissions = []
    for request in requests:
        delivery = request.delivery
        if delivery is None:
            submissions.append(placing.place(request.spec, request.payload, request.joins))
            continue
        key = delivery.source, delivery.id
        number = told[key][1] if key in told else seen.get(key)
        if number is not None:
            submission = Submission(job=placing.job(number), is_new=False, how="duplicate")
        else:
            submission = placing.place(request.spec, request.payload, request.joins, delivery.id)
            told[key] = delivery, number_of(submission.job.id)
        submissions.append(submission)
    placing.write()
    _write_answers(connection, told, seen, now)
    return submissions


def _seen(connection: Connection, requests: Sequence[JobRequest]) -> Mapping[Key, int | None]:
    """The job of each delivery that came before; None for one that was ignored."""
    ids: defaultdict[str, list[str]] = defaultdict(list)
    for request in requests:
        if request.delivery is not None:
            ids[request.delivery.source].append(request.delivery.id)
    seen = {}
    # One query per source: of pairs, SQLite would compare each with every row.
    for source in ids:
        query = select(DELIVERIES.c.id, DELIVERIES.c.job_number)
        known = DELIVERIES.c.source == source, DELIVERIES.c.id.in_(ids[source])
        for row in connection.execute(query.where(*known)):
            seen[source, row.id] = row.job_number
    return seen


def _write_answers(
    connection: Connection,
    told: Mapping[Key, tuple[Delivery, int]],
    seen: Mapping[Key, int | None],
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
        for key, (delivery, number) in told.items()
        if key not in seen
    ]
    if new:
        connection.execute(insert(DELIVERIES), new)
    for key in told.keys() & seen.keys():  # ignored before
        answer = update(DELIVERIES).where(*is_delivery(*key))
        connection.execute(answer.values(job_number=told[key][1], ignored_reason=None))


@dataclass(frozen=True, kw_only=True)
class _Latest:
    """The newest job of a pipeline; the pending one is always that."""

    job: Job
    dedupe_key: str | None


class _Placing:
    def __init__(self, connection: Connection, now: float) -> None:
        self._connection = connection
        self._now = now
        self._latest: dict[str, _Latest | None] = {}
        self._changed: set[str] = set()
        self._named: list[tuple[int, str]] = []
        """A job's number, and a delivery that it answers for now."""

    def place(
        self,
        spec: JobSpec,
        payload: dict[str, Any] | None,
        joins: bool,
        delivery_id: str | None = None,
    ) -> Submission:
        submission = self._place(spec, payload, joins)
        # Nobody has read a pending job, so it can name the deliveries that it also answers.
        if spec.revisions is not None and submission.job.state == "SCHEDULING":
            number = number_of(submission.job.id)
            arrived = () if delivery_id is None else (delivery_id,)
            self._named += [(number, id) for id in (*spec.revisions.delivery_ids, *arrived)]
        return submission

    def _place(self, spec: JobSpec, payload: dict[str, Any] | None, joins: bool) -> Submission:
        latest = self._twin_alone(spec) if spec.pipeline is None else self._newest(spec.pipeline)
        if (
            # Only the latest job counts: after a push of A, of B and of A again, the last one has
            # to be trained on once more.
            latest is not None
            and spec.dedupe_key is not None
            and latest.dedupe_key == spec.dedupe_key
            and latest.job.state != "ERROR"
        ):
            return Submission(job=latest.job, is_new=False, how="duplicate")
        if spec.pipeline is None or latest is None or latest.job.state != "SCHEDULING":
            job = self._insert(spec, payload)
            self._keep(spec.pipeline, _Latest(job=job, dedupe_key=spec.dedupe_key))
            return Submission(job=job, is_new=True, how="created")
        if not joins:
            raise PendingJob(latest.job.id, spec.pipeline)
        merged = self._merged(latest, spec, payload)
        self._keep(spec.pipeline, merged, is_changed=True)
        return Submission(job=merged.job, is_new=False, how="merged")

    def job(self, number: int) -> Job:
        """As it stands after the submissions so far."""
        for latest in self._latest.values():
            if latest is not None and number_of(latest.job.id) == number:
                return latest.job
        row = self._connection.execute(select(JOBS).where(JOBS.c.number == number)).one_or_none()
        if row is None:
            raise JobNotFound(job_id_of(number))
        return record(row)

    def write(self) -> None:
        for pipeline in self._changed:
            latest = self._latest[pipeline]
            assert latest is not None
            self._connection.execute(
                update(JOBS)
                .where(JOBS.c.number == number_of(latest.job.id))
                .values(
                    spec=spec_as_json(latest.job.spec),
                    run_after=latest.job.run_after,
                    payload=_as_json(latest.job.payload),
                    dedupe_key=latest.dedupe_key,
                )
            )
        name_deliveries(self._connection, self._named, self._now)

    def _newest(self, pipeline: str) -> _Latest | None:
        if pipeline not in self._latest:
            query = select(JOBS).where(JOBS.c.pipeline == pipeline)
            row = self._connection.execute(
                query.order_by(JOBS.c.number.desc()).limit(1)
            ).one_or_none()
            self._latest[pipeline] = (
                None if row is None else _Latest(job=record(row), dedupe_key=row.dedupe_key)
            )
        return self._latest[pipeline]

    def _twin_alone(self, spec: JobSpec) -> _Latest | None:
        """A command without a pipeline has its key to itself."""
        if spec.dedupe_key is None:
            return None
        query = select(JOBS).where(JOBS.c.pipeline.is_(None), JOBS.c.dedupe_key == spec.dedupe_key)
        row = self._connection.execute(query.order_by(JOBS.c.number.desc()).limit(1)).one_or_none()
        return None if row is None else _Latest(job=record(row), dedupe_key=row.dedupe_key)

    def _merged(self, latest: _Latest, spec: JobSpec, payload: dict[str, Any] | None) -> _Latest:
        both = joined(latest.job.spec, spec)
        run_after = due_at(both, latest.job.created_at, self._now)
        job = replace(latest.job, spec=both, run_after=run_after)
        if newest_commit(both) != newest_commit(spec):
            # Older commits that arrived late: the payload is the newest one's.
            return replace(latest, job=job)
        return _Latest(job=replace(job, payload=payload), dedupe_key=spec.dedupe_key)

    def _insert(self, spec: JobSpec, payload: dict[str, Any] | None) -> Job:
        row = self._connection.execute(
            insert(JOBS)
            .values(
                pipeline=spec.pipeline,
                state="SCHEDULING",
                spec=spec_as_json(spec),
                payload=_as_json(payload),
                dedupe_key=spec.dedupe_key,
                created_at=self._now,
                run_after=due_at(spec, self._now, self._now),
                attempt=0,
                num_lost=0,
                cancel_requested=False,
            )
            .returning(*JOBS.c)
        ).one()
        return record(row)

    def _keep(self, pipeline: str | None, latest: _Latest, *, is_changed: bool = False) -> None:
        if pipeline is not None:
            self._latest[pipeline] = latest
            if is_changed:
                self._changed.add(pipeline)


def _as_json(payload: dict[str, Any] | None) -> str | None:
    return None if payload is None else json.dumps(payload)
