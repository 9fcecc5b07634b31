"""The handler that starts retrainings: it submits a job for each push to a ref of a dataset
(normally a branch) that a pipeline follows. It ignores all other events, and its answer says why an
event was ignored."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import anyio.to_thread
from fastapi import Request

from jobs.spec import JobSpec
from jobs.store import Delivery, JobRequest, JobStore
from receiver.payload import WebhookPayload
from receiver.rules import RetrainRule, decide

__all__ = ["RetrainRule", "retrain_handler"]

logger = logging.getLogger(__name__)

Answer = dict[str, str | list[str]]


def retrain_handler(
    store: JobStore, rules: Sequence[RetrainRule]
) -> Callable[[WebhookPayload, Request], Awaitable[Answer]]:
    """A handler for `WebhooksServer.add_webhook("/retrain", knows_repeats=True)`. The argument
    `knows_repeats` says that the handler itself recognises repeated deliveries.

    The handler answers `{"job": id}` after the job and the delivery were stored. If several
    pipelines follow the ref, the answer also has `"jobs"`, a list of the ids of all their jobs. If
    an event needs no job, the answer is `{"ignored": reason}`.

    A job trains on the head of the ref when it starts, and not on the commit of the event. So it
    does not matter in which order deliveries arrive, or whether some are lost. If a sender repeats
    a delivery, the answer names the job that is recorded for it. But if this job failed or was
    cancelled, the delivery is handled like a new one.
    """
    arrived: list[tuple[_Event, asyncio.Future[Answer]]] = []
    writing = anyio.Lock()

    async def store_event(event: _Event) -> Answer:
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        arrived.append((event, answer))
        # Only one transaction runs at a time. The first event that gets the lock stores all events
        # that have arrived meanwhile, so that they wait for the disk only once.
        async with writing:
            batch, arrived[:] = arrived[:], []
            try:
                events = [event for event, _ in batch]
                answers = await anyio.to_thread.run_sync(_store_events, store, events)
            except Exception as error:
                for _, waiting in batch:
                    waiting.set_exception(error)
            else:
                for (_, waiting), stored in zip(batch, answers, strict=True):
                    waiting.set_result(stored)
        return await answer

    async def retrain(payload: WebhookPayload, request: Request) -> Answer:
        event = _Event(
            webhook=_storable(payload.webhook.id),
            delivery_id=request.state.delivery_id,
            payload=await request.json(),
            decision=decide(payload, rules),
        )
        answer = await store_event(event)
        job = answer.get("job")
        logger.info(
            "delivery %s: %s",
            event.delivery_id,
            answer["ignored"] if job is None else f"job {job}",
            extra={"delivery_id": event.delivery_id} | ({"job_id": job} if job is not None else {}),
        )
        return answer

    return retrain


@dataclass(frozen=True, kw_only=True)
class _Event:
    webhook: str
    """The id of the webhook."""
    delivery_id: str
    payload: dict[str, Any]
    decision: tuple[JobSpec, ...] | str
    """The specs of the jobs to submit, or the reason why the event needs no job."""

    def requests(self) -> list[JobRequest]:
        """One request per job; empty if the event needs no job. The source of each delivery
        contains the pipeline's name. Without this name, all requests of one event would have the
        same source and the same delivery id. The store would then take the second request for a
        repeat of the first."""
        specs = () if isinstance(self.decision, str) else self.decision
        return [
            JobRequest(
                spec=spec,
                payload=self.payload,
                delivery=Delivery(source=f"{self.webhook}/{spec.pipeline}", id=self.delivery_id),
            )
            for spec in specs
        ]


def _store_events(store: JobStore, events: Sequence[_Event]) -> list[Answer]:
    submissions = store.submit_all([one for event in events for one in event.requests()])
    jobs = iter(submissions)
    answers: list[Answer] = []
    for event in events:
        if isinstance(event.decision, str):
            answers.append({"ignored": event.decision})
        else:
            ids = [next(jobs).job.id for _ in event.decision]
            answers.append({"job": ids[0]} if len(ids) == 1 else {"job": ids[0], "jobs": ids})
    return answers


def _storable(text: str) -> str:
    """The text, escaped to ASCII and cut to 200 characters. Without the escapes, databases would
    refuse some characters, such as NUL and lone surrogates."""
    return ascii(text)[1:-1][:200]
