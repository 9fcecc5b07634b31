"""The retrain handler: a commit to a followed dataset becomes a job, anything else a reason."""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio.to_thread
from fastapi import Request

from jobs.store import Delivery, JobStore
from receiver.payload import WebhookPayload
from receiver.rules import RetrainRule, decide

__all__ = ["RetrainRule", "retrain_handler"]

logger = logging.getLogger(__name__)

Answer = dict[str, str | list[str]]


def retrain_handler(
    store: JobStore, rules: Sequence[RetrainRule]
) -> Callable[[WebhookPayload, Request], Awaitable[Answer]]:
    """A handler for `WebhooksServer.add_webhook("/retrain")`.

    It answers `{"job": id}` once the job and the delivery are stored, with `"jobs"` beside it where
    several pipelines follow the dataset, and `{"ignored": reason}` for what calls for no job. A
    delivery that is repeated gets the first answer, whatever became of its job.

    Raises:
        ValueError: Two rules name one pipeline.
    """
    for pipeline, count in Counter(rule.pipeline for rule in rules).items():
        if count > 1:
            raise ValueError(f"{count} rules name the pipeline {pipeline!r}; it can follow one ref")
    # SQLite takes one writer; writers that wait in our queue find the lock free, and those that
    # wait for the lock sleep and try again.
    one_writer = anyio.CapacityLimiter(1)

    async def retrain(payload: WebhookPayload, request: Request) -> Answer:
        raw: dict[str, Any] = await request.json()
        body = (await request.body()).decode()
        delivery_id: str = request.state.delivery_id

        def store_event() -> Answer:
            return _store_event(store, rules, payload, raw, delivery_id, body)

        answer = await anyio.to_thread.run_sync(store_event, limiter=one_writer)
        job = answer.get("job")
        logger.info(
            "delivery %s: %s",
            delivery_id,
            answer["ignored"] if job is None else f"job {job}",
            extra={"delivery_id": delivery_id} | ({"job_id": job} if job is not None else {}),
        )
        return answer

    return retrain


def _store_event(
    store: JobStore,
    rules: Sequence[RetrainRule],
    payload: WebhookPayload,
    raw: dict[str, Any],
    delivery_id: str,
    body: str,
) -> Answer:
    # A database takes neither NUL nor half a surrogate pair.
    webhook = ascii(payload.webhook.id)[1:-1][:200]
    decision = decide(payload, rules)
    if isinstance(decision, str):
        store.ignore(Delivery(source=webhook, id=delivery_id, body=body), decision)
        return {"ignored": decision}
    # A source for each pipeline: a delivery leads to one job of each, and one that was stored for
    # some of them when the process died is completed by the sender's next attempt.
    job_ids = [
        store.submit(
            spec,
            payload=raw,
            delivery=Delivery(source=f"{webhook}/{spec.pipeline}", id=delivery_id, body=body),
        ).job.id
        for spec in decision
    ]
    return {"job": job_ids[0]} if len(job_ids) == 1 else {"job": job_ids[0], "jobs": job_ids}
