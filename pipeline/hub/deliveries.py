"""Sends what the outbox holds: one worker per webhook, so that a slow receiver delays only itself.

A worker sends one delivery at a time, oldest event first, so that a receiver sees the commits of a
ref in their order as long as it answers. Headers: https://www.standardwebhooks.com and the Hub's.
"""

import asyncio
import ipaddress
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

import httpx
from sqlalchemy.exc import OperationalError
from standardwebhooks import Webhook as Signer

from pipeline.hub import outbox
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError, WebhookNotFound
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.outbox import Attempt, Due
from pipeline.hub.settings import HubSettings
from pipeline.hub.webhooks import SecretBox, Webhook, get_webhook

logger = logging.getLogger(__name__)

MAX_RETRY_AFTER_SECONDS = 3600.0

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")


class Deliverer:
    """Between `start` and `stop` it delivers; `wake` tells it that the outbox has more."""

    def __init__(
        self, database: Database, settings: HubSettings, box: SecretBox, metrics: HubMetrics
    ) -> None:
        self._database = database
        self._settings = settings
        self._box = box
        self._metrics = metrics
        self._loop: asyncio.AbstractEventLoop | None = None
        self._more = asyncio.Event()
        self._dispatcher: asyncio.Task[None] | None = None
        self._workers: dict[str, tuple[asyncio.Task[None], asyncio.Event]] = {}

    def start(self) -> None:
        """Called in the event loop; sends at once what an earlier hub left behind."""
        self._loop = asyncio.get_running_loop()
        self._more.set()
        self._dispatcher = asyncio.create_task(self._dispatch())

    def wake(self) -> None:
        """From any thread, after the commit that put deliveries into the outbox."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._more.set)

    async def stop(self) -> None:
        """Ends attempts that are under way; they stay pending."""
        self._loop = None
        tasks = [task for task, _ in self._workers.values()]
        tasks += [self._dispatcher] if self._dispatcher else []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _dispatch(self) -> None:
        # No proxy from the environment: it would be asked for receivers on this very machine.
        async with httpx.AsyncClient(follow_redirects=False, trust_env=False) as client:
            while True:
                await self._more.wait()
                self._more.clear()
                for webhook_id in await self._persist(self._with_pending):
                    if webhook_id in self._workers:
                        self._workers[webhook_id][1].set()
                    else:
                        more = asyncio.Event()
                        worker = asyncio.create_task(self._work(client, webhook_id, more))
                        self._workers[webhook_id] = (worker, more)

    async def _persist(
        self, act: Callable[Arguments, Answer], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        """Does what needs the database, again while a full disk or a lock is in the way."""
        while True:
            try:
                return await asyncio.to_thread(act, *args, **kwargs)
            except OperationalError as error:
                logger.error("the outbox cannot be used, trying again in 1 s: %s", error.orig)
                await asyncio.sleep(1)

    def _with_pending(self) -> list[str]:
        with self._database.read() as connection:
            return outbox.webhooks_with_pending(connection)

    async def _work(self, client: httpx.AsyncClient, webhook_id: str, more: asyncio.Event) -> None:
        """Until nothing is pending for the webhook."""
        refused_wait = self._settings.refused_min_seconds
        while True:
            more.clear()
            found = await self._persist(self._next, webhook_id)
            if found is None:
                if more.is_set():
                    continue
                # No await since the look at `more`: the dispatcher cannot have set it in between.
                del self._workers[webhook_id]
                return
            due, webhook = found
            if (wait := due.next_attempt_at - time.time()) > 0:
                # A new event, or a replay, may be due earlier.
                await _wait(more, wait)
                continue
            attempt = await self._attempt(client, due, webhook)
            await self._persist(self._settle, due, webhook, attempt)
            if attempt.refused:
                await asyncio.sleep(refused_wait)
                refused_wait = min(2 * refused_wait, self._settings.refused_max_seconds)
            else:
                refused_wait = self._settings.refused_min_seconds

    def _next(self, webhook_id: str) -> tuple[Due, Webhook] | None:
        with self._database.read() as connection:
            due = outbox.next_due(connection, webhook_id)
            if due is None:
                return None
            try:
                return due, get_webhook(connection, webhook_id)
            except WebhookNotFound:  # deleted since
                return None

    def _settle(self, due: Due, webhook: Webhook, attempt: Attempt) -> None:
        # Lost with a power cut, it is sent again: the receiver knows the id.
        with self._database.write_relaxed() as connection:
            status = outbox.settle(connection, due, attempt, self._settings)
        result = "refused" if attempt.refused and status == "pending" else status
        self._metrics.deliveries.labels(result="failed" if result == "pending" else result).inc()
        if status == "delivered":
            self._metrics.delivery_seconds.observe(time.time() - due.queued_at)
        elif not attempt.refused or status == "dead":
            logger.warning(
                "delivery %s to %s: %s (attempt %d, %s)",
                due.id,
                _without_query(webhook.url),
                attempt.error or f"answered {attempt.response_status}",
                due.attempt + 1,
                "given up" if status == "dead" else "will be tried again",
                extra={"delivery_id": due.id},
            )

    async def _attempt(self, client: httpx.AsyncClient, due: Due, webhook: Webhook) -> Attempt:
        started_at, clock = time.time(), time.perf_counter()
        status = head = retry_after = error = None
        refused = False
        try:
            request_headers = headers(due.id, due.payload, self._box.open(webhook))
            async with (
                asyncio.timeout(self._settings.delivery_timeout_seconds),
                client.stream(
                    "POST",
                    webhook.url,
                    content=due.payload.encode(),
                    headers=request_headers,
                    timeout=self._settings.delivery_timeout_seconds,
                ) as response,
            ):
                status = response.status_code
                retry_after = _retry_after_seconds(response.headers.get("retry-after"))
                head = await _head(response)
        except TimeoutError:
            status = None
            error = f"no answer within {self._settings.delivery_timeout_seconds:g} s"
        except (httpx.HTTPError, httpx.InvalidURL, HubError) as failure:
            status = None
            error = str(failure) or type(failure).__name__
            refused = isinstance(failure, httpx.ConnectError) and _is_loopback(webhook.url)
        return Attempt(
            started_at=started_at,
            milliseconds=1000 * (time.perf_counter() - clock),
            response_status=status,
            response_head=head,
            retry_after_seconds=retry_after,
            error=error,
            refused=refused,
        )


def headers(delivery_id: str, payload: str, secret: str | None) -> dict[str, str]:
    """What goes with a payload. The id stays the same over retries and replays.

    The key of the signature is the base64 part of a `whsec_` secret, else the secret's own bytes.
    """
    now = datetime.now(UTC)
    proofs = {}
    if secret is not None:
        signer = Signer(secret if secret.startswith("whsec_") else secret.encode())
        proofs = {
            "X-Webhook-Secret": secret,
            "webhook-signature": signer.sign(delivery_id, now, payload),
        }
    return {
        "Content-Type": "application/json",
        "User-Agent": "hotpush-hub",
        "Webhook-Id": delivery_id,
        "webhook-timestamp": str(int(now.timestamp())),
        **proofs,
    }


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass


async def _head(response: httpx.Response) -> str:
    """The first characters of the answer; the rest is not read."""
    body = b""
    async for chunk in response.aiter_bytes():
        body += chunk
        if len(body) >= outbox.HEAD_CHARACTERS:
            break
    return body.decode(errors="replace")[: outbox.HEAD_CHARACTERS]


def _retry_after_seconds(value: str | None) -> float | None:
    """Seconds or an HTTP date (RFC 9110, 10.2.3), at most an hour; None for anything else."""
    if value is None:
        return None
    try:
        if value.isascii() and value.isdigit():
            seconds = float(value)
        else:
            seconds = (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):
        return None
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_SECONDS)


def _is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _without_query(url: str) -> str:
    """For logs: a query may carry a secret, and so may the user part."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
