"""Sends the deliveries that `outbox.py` stores. For each webhook, one task sends the head of its
queue, so a slow receiver delays only its own deliveries.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

from jobs.errors import JobError
from pipeline.hub.cipher import Cipher
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.job_copies import JobLauncher
from pipeline.hub.webhooks.outbox import Attempt, Due
from pipeline.hub.webhooks.posting import post
from pipeline.hub.webhooks.store import StoredWebhook
from receiver.webhooks import WebhookStatus

logger = logging.getLogger(__name__)

BROKEN_OFF_SECONDS = 1.0

_STATUS_CHANGE_LOGS: dict[WebhookStatus, str] = {
    "suspended": "webhook %s to %s is SUSPENDED, because its oldest delivery fails again and "
    "again, and the others wait. `pipeline webhooks enable` tries it at once.",
    "enabled": "webhook %s to %s answers again: its suspension is over, and the deliveries that "
    "waited are sent now.",
    "disabled": "webhook %s to %s is DISABLED, because the receiver answered 410 (gone). "
    "`pipeline webhooks enable` enables it again.",
}

Answer = TypeVar("Answer")
Arguments = TypeVarTuple("Arguments")


@dataclass
class Deliverer:
    """Sends deliveries from `start` until `stop`. It looks for new ones after each write into the
    database."""

    database: Database
    settings: HubSettings
    cipher: Cipher
    metrics: HubMetrics
    launcher: JobLauncher
    _loop: asyncio.AbstractEventLoop | None = None
    _dispatcher: asyncio.Task[None] | None = None
    _more: asyncio.Event = field(default_factory=asyncio.Event)
    _sending: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    """By the webhook's id: the task that sends the head of its queue."""

    def start(self) -> None:
        """The caller is in the event loop. First sends the deliveries that an earlier run of the
        hub left pending."""
        self._loop = asyncio.get_running_loop()
        self.database.after_write = self._wake
        self._dispatcher = asyncio.create_task(self._dispatch())

    def _wake(self) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._more.set)

    async def stop(self) -> None:
        """Breaks off the unfinished attempts. The states of their deliveries do not change, so the
        next run of the hub sends these deliveries again."""
        self._loop = None
        tasks = [*self._sending.values(), *([self._dispatcher] if self._dispatcher else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dispatch(self) -> None:
        """Starts a task for each head that is due, then waits until another one is."""
        while True:
            self._more.clear()
            # Taken before the queues are read: what is read about a head that is being sent may be
            # out of date. When its task ends, it sets `_more`.
            busy = set(self._sending)
            queues = await self._until_it_works("dispatcher", self._read_queues)
            waits = {id: at - time.time() for id, at in queues.items() if id not in busy}
            for webhook_id, seconds in waits.items():
                if seconds <= 0:
                    task = asyncio.create_task(self._send_head(webhook_id))
                    self._sending[webhook_id] = task
            later = min((seconds for seconds in waits.values() if seconds > 0), default=None)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(later):
                    await self._more.wait()

    async def _send_head(self, webhook_id: str) -> None:
        try:
            found = await self._until_it_works("webhook", self._read_head, webhook_id)
            if found is not None:
                attempt = await self._attempt(*found)
                # Apart from the attempt, which must not be repeated each second.
                await self._until_it_works("webhook", self._settle, *found, attempt)
        finally:
            del self._sending[webhook_id]
            self._more.set()

    async def _until_it_works(
        self, worker: str, act: Callable[[*Arguments], Answer], *arguments: *Arguments
    ) -> Answer:
        """Calls `act` in a thread, and after an error calls it again. The disk may be full, the
        database may be locked or damaged, or the hub has an error. The deliveries are still stored,
        so they must go on after any error; otherwise they would wait for a restart of the hub."""
        while True:
            try:
                return await asyncio.to_thread(act, *arguments)
            except Exception:
                self.metrics.worker_failures.labels(worker=worker).inc()
                logger.exception(
                    "%s: an error stopped the deliveries; they go on in %g s",
                    *(worker, BROKEN_OFF_SECONDS),
                )
                await asyncio.sleep(BROKEN_OFF_SECONDS)

    def _read_queues(self) -> dict[str, float]:
        with self.database.read() as connection:
            return outbox.queues(connection)

    def _read_head(self, webhook_id: str) -> tuple[Due, StoredWebhook] | None:
        with self.database.read() as connection:
            return outbox.head(connection, webhook_id)

    def _settle(self, due: Due, webhook: StoredWebhook, attempt: Attempt) -> None:
        with self.database.write() as connection:
            status, change = outbox.settle(connection, due, webhook, attempt, self.settings)
        # Not by the status alone: a delivery that was taken is pending if a person replayed it
        # during the attempt.
        result = "delivered" if attempt.succeeded else "failed" if status == "pending" else "dead"
        self.metrics.deliveries.labels(result=result).inc()
        if change is not None:
            logger.error(_STATUS_CHANGE_LOGS[change], webhook.id, webhook.target)
        if attempt.refused:
            return  # the receiver is starting; every half second would be too many lines
        said = "taken"
        if attempt.succeeded:
            self.metrics.delivery_seconds.observe(time.time() - due.queued_at)
        else:
            failure = attempt.error or f"answered {attempt.response_status}"
            next_step = "will be tried again" if status == "pending" else "given up"
            said = f"{failure} (attempt {due.attempt + 1}, {next_step})"
        logger.log(
            logging.INFO if attempt.succeeded else logging.WARNING,
            "delivery %s to %s: %s",
            *(due.id, webhook.target, said),
            extra={"delivery_id": due.id},
        )

    async def _attempt(self, due: Due, webhook: StoredWebhook) -> Attempt:
        """Makes one attempt. Never raises: any error becomes the `error` of the attempt."""
        try:
            if webhook.url is not None:
                secret = self.cipher.decrypt(webhook.encrypted_secret)
                timeout_seconds = self.settings.delivery_timeout_seconds
                return await post(due, webhook.url, secret, timeout_seconds=timeout_seconds)
            return await asyncio.to_thread(self.launcher.launch, due, webhook)
        except (HubError, JobError) as failure:
            error = str(failure)
        except Exception as failure:
            # The hub has an error. If this raised the error, the attempt would have no end.
            self.metrics.worker_failures.labels(worker="attempt").inc()
            logger.exception(
                "delivery %s to %s: the hub failed",
                *(due.id, webhook.target),
                extra={"delivery_id": due.id},
            )
            error = f"the hub failed ({type(failure).__name__}); its log says where"
        return Attempt(started_at=time.time(), milliseconds=0, error=error)
