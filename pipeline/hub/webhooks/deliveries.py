"""Sends the deliveries that `outbox.py` stores. Each webhook has its own worker, so a slow receiver
delays only its own deliveries.

A worker sends one delivery at a time: the head of the webhook's queue.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeVar

from pipeline.hub.cipher import Cipher
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.job_copies import JobLauncher
from pipeline.hub.webhooks.outbox import Attempt, Due, StatusChange
from pipeline.hub.webhooks.posting import Poster
from pipeline.hub.webhooks.store import StoredWebhook, find_webhook

logger = logging.getLogger(__name__)

BROKEN_OFF_SECONDS = 1.0

_STATUS_CHANGE_LOGS: dict[StatusChange, str] = {
    "failing": "webhook %s to %s is SUSPENDED, because its oldest delivery fails again and again, "
    "and the others wait. `pipeline webhooks enable` tries it at once.",
    "answered": "webhook %s to %s answers again: its suspension is over, and the deliveries that "
    "waited are sent now.",
    "gone": "webhook %s to %s is DISABLED, because the receiver answered 410 (gone). "
    "`pipeline webhooks enable` enables it again.",
}

Answer = TypeVar("Answer")


class Deliverer:
    """Sends deliveries from `start` until `stop`. It looks for new ones after `wake`."""

    def __init__(
        self,
        database: Database,
        settings: HubSettings,
        cipher: Cipher,
        metrics: HubMetrics,
        launcher: JobLauncher | None,
    ) -> None:
        self._database = database
        self._settings = settings
        self._cipher = cipher
        self._metrics = metrics
        self._launcher = launcher
        self._loop: asyncio.AbstractEventLoop | None = None
        self._more = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._workers: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self) -> None:
        """The caller is in the event loop. First sends the deliveries that an earlier run of the
        hub left pending."""
        self._loop = asyncio.get_running_loop()
        self._more.set()
        self._dispatcher = asyncio.create_task(self._dispatch())

    def wake(self) -> None:
        """Tells the deliverer that there are new deliveries. The caller may be in any thread, and
        has committed the transaction that stored them."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._more.set)

    async def stop(self) -> None:
        """Breaks off the unfinished attempts. The states of their deliveries do not change, so the
        next run of the hub sends these deliveries again."""
        self._loop = None
        tasks = [task for task, _ in self._workers.values()]
        tasks += [self._dispatcher] if self._dispatcher else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dispatch(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            for webhook_id in await self._until_it_works("dispatcher", self._to_serve):
                if webhook_id in self._workers:
                    self._workers[webhook_id][1].set()
                else:
                    more = asyncio.Event()
                    worker = asyncio.create_task(self._work(webhook_id, more))
                    self._workers[webhook_id] = (worker, more)

    async def _until_it_works(self, worker: str, act: Callable[[], Awaitable[Answer]]) -> Answer:
        """Calls `act`, and after an error calls it again. The disk may be full, the database may be
        locked or damaged, or the hub has an error. The deliveries are still stored, so they must go
        on after any error; otherwise they would wait for a restart of the hub."""
        while True:
            try:
                return await act()
            except Exception:
                self._metrics.worker_failures.labels(worker=worker).inc()
                logger.exception(
                    "%s: an error stopped the deliveries; they go on in %g s",
                    *(worker, BROKEN_OFF_SECONDS),
                )
                await asyncio.sleep(BROKEN_OFF_SECONDS)

    async def _to_serve(self) -> list[str]:
        def read() -> list[str]:
            with self._database.read() as connection:
                return outbox.webhooks_to_serve(connection)

        return await asyncio.to_thread(read)

    async def _work(self, webhook_id: str, more: asyncio.Event) -> None:
        """Sends the webhook's deliveries until there is none left."""
        poster = Poster(self._settings.delivery_timeout_seconds)
        try:
            await self._until_it_works(
                "webhook", partial(self._deliver_all, poster, webhook_id, more)
            )
        finally:
            await poster.close()

    async def _deliver_all(self, poster: Poster, webhook_id: str, more: asyncio.Event) -> None:
        while True:
            more.clear()
            found = await asyncio.to_thread(self._next, webhook_id)
            if found is None:
                if more.is_set():
                    continue
                # There is no await between the check of `more` and this line. So the dispatcher
                # cannot set `more` between them.
                del self._workers[webhook_id]
                return
            due, webhook = found
            if (wait := due.next_attempt_at - time.time()) > 0:
                # Wake up early: a person may have enabled the webhook or replayed a delivery.
                await _wait(more, wait)
                continue
            attempt = await self._attempt(poster, due, webhook)
            # Apart from the attempt, which must not be repeated each second.
            await self._until_it_works(
                "webhook", partial(asyncio.to_thread, self._settle, due, webhook, attempt)
            )

    def _next(self, webhook_id: str) -> tuple[Due, StoredWebhook] | None:
        with self._database.read() as connection:
            webhook = find_webhook(connection, webhook_id)
            due = None if webhook is None else outbox.head(connection, webhook)
            return None if webhook is None or due is None else (due, webhook)

    def _settle(self, due: Due, webhook: StoredWebhook, attempt: Attempt) -> None:
        # A power cut may lose this relaxed write. The hub then sends the delivery again, and the
        # receiver recognises its id.
        with self._database.write_relaxed() as connection:
            status, change = outbox.settle(connection, due, webhook, attempt, self._settings)
        # Not by the status alone: a delivery that was taken is pending if a person replayed it
        # during the attempt.
        result = "delivered" if attempt.succeeded else "dead" if status == "dead" else "failed"
        self._metrics.deliveries.labels(result=result).inc()
        if change is not None:
            logger.error(_STATUS_CHANGE_LOGS[change], webhook.id, webhook.target)
        if attempt.succeeded:
            self._metrics.delivery_seconds.observe(time.time() - due.queued_at)
            logger.info(
                "delivery %s to %s: taken",
                *(due.id, webhook.target),
                extra={"delivery_id": due.id},
            )
        elif not attempt.refused:
            logger.warning(
                "delivery %s to %s: %s (attempt %d, %s)",
                due.id,
                webhook.target,
                attempt.error or f"answered {attempt.response_status}",
                due.attempt + 1,
                "given up" if status == "dead" else "will be tried again",
                extra={"delivery_id": due.id},
            )

    async def _attempt(self, poster: Poster, due: Due, webhook: StoredWebhook) -> Attempt:
        """Makes one attempt. Never raises: any error becomes the `error` of the attempt."""
        try:
            if webhook.url is not None:
                secret = self._cipher.decrypt(webhook.encrypted_secret)
                return await poster.post(due, webhook.url, secret)
            if self._launcher is not None:
                return await asyncio.to_thread(self._launcher.launch, due, webhook, self._cipher)
            error = "this hub was started without a job store, so its webhooks cannot start jobs"
        except HubError as failure:
            error = str(failure)
        except Exception as failure:
            # The hub has an error. If this raised the error, the worker would repeat the attempt
            # each second, without end.
            self._metrics.worker_failures.labels(worker="attempt").inc()
            logger.exception(
                "delivery %s to %s: the hub failed",
                *(due.id, webhook.target),
                extra={"delivery_id": due.id},
            )
            error = f"the hub failed ({type(failure).__name__}); its log says where"
        return Attempt(started_at=time.time(), milliseconds=0, error=error)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
