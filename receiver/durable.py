"""Handlers that are called after their sender was answered, again and again until they succeed.

At least once: a handler that was at work when the process died is called again.
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio.to_thread
from starlette.types import ASGIApp, Message

from receiver.batching import Batches
from receiver.delivery_log import DeliveryLog, EndedCall, NewDelivery, StoredDelivery
from receiver.errors import NotWorking

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)

MAX_AT_WORK = 8
LONGEST_PAUSE_SECONDS = 600.0
FORGET_SECONDS = 3600.0
QUIET_SECONDS, YIELD_SECONDS = 0.005, 0.1
"""Senders that wait for their answer go before handlers that wait for their call: these begin when
nothing arrived for the first time, or after the second."""


class DurableDeliveries:
    """The log, and the task that works it off while `working` is entered.

    `handlers` are applications for one path each, which take the stored request as it came.
    """

    def __init__(self, path: Path, *, shutdown_seconds: float) -> None:
        self._path = path
        self._shutdown_seconds = shutdown_seconds
        self._handlers: dict[str, ASGIApp] = {}
        self._log: DeliveryLog | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """While `working` is entered."""
        self._is_stopping = False
        self._one_thread = anyio.CapacityLimiter(1)
        self._batches = Batches(self._store)
        self._known: set[tuple[str, str]] = set()
        """Deliveries that wait for their call, are at work, or whose end is not written yet."""
        self._waiting: deque[StoredDelivery] = deque()
        self._at_work: set[asyncio.Task[None]] = set()
        self._ended: list[EndedCall] = []

    def add_handler(self, path: str, handler: ASGIApp) -> None:
        """From any thread, also while others are at work. Raises as `open` does."""
        if self._loop is not None:
            self._opened()
        self._handlers[path] = handler
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def open(self) -> None:
        """Take the log, if there are handlers. Raises `ReceiverError` if another process has it."""
        if self._handlers:
            self._opened()

    async def accept(self, path: str, id: str, headers: dict[str, str], body: bytes) -> bool:
        """Store the delivery. Whether it is new. Raises `NotWorking` outside of `working`."""
        if self._loop is None:
            raise NotWorking(
                "Nothing works off this server's durable deliveries: the application that mounts it"
                " must enter `WebhooksServer.lifespan`, as FastAPI(lifespan=server.lifespan) does."
            )
        delivery = NewDelivery(path=path, id=id, headers=headers, body=body)
        return await self._batches.add(delivery)

    async def _store(self, deliveries: Sequence[NewDelivery]) -> Sequence[bool]:
        are_new = await self._in_thread(self._opened().add, deliveries, time.time())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)
        return are_new

    @contextlib.asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Call handlers, those first that a previous process left; wait for them at the end."""
        if self._loop is not None:
            yield  # entered already, by whoever serves the same application elsewhere
            return
        self.open()
        self._wake = asyncio.Event()  # of this event loop; the server may be launched in others
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        working = asyncio.create_task(self._work())
        try:
            yield
        finally:
            # Not cancelled: it may be in the middle of a statement, in its thread.
            self._is_stopping = True
            self._wake.set()
            await working
            if self._at_work:
                _, late = await asyncio.wait(self._at_work, timeout=self._shutdown_seconds)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
            self._known.clear()
            self._waiting.clear()
            self._loop = None
            if self._log is not None:
                try:
                    self._log.settle(self._ended)
                finally:
                    self._ended = []
                    self._log.close()
                    self._log = None

    def _opened(self) -> DeliveryLog:
        if self._log is None:
            self._log = DeliveryLog(self._path)
        return self._log

    async def _work(self) -> None:
        while not self._is_stopping:
            try:
                await self._work_off()
            except sqlite3.Error as error:
                # A full disk, mostly. What is stored stays; an end that was not written is kept.
                _logger.error("%s cannot be used, trying again in 1 s: %s", self._path, error)
                await asyncio.sleep(1)

    async def _work_off(self) -> None:
        forget_at = 0.0
        waiting = self._waiting
        while not self._is_stopping:
            self._wake.clear()
            log = self._log
            if log is None:  # until there is a durable handler
                await self._wake.wait()
                continue
            await self._batches.quiet(for_seconds=QUIET_SECONDS, within_seconds=YIELD_SECONDS)
            now = time.time()
            if now >= forget_at:
                await self._in_thread(log.forget, now)
                forget_at = now + FORGET_SECONDS
            await self._settle(log)
            if not waiting:
                waiting.extend(await self._next(log, now))
            while waiting and len(self._at_work) < MAX_AT_WORK:
                task = asyncio.create_task(self._handle(waiting.popleft()))
                self._at_work.add(task)
                task.add_done_callback(self._at_work.discard)
            if waiting:
                await self._wake.wait()
                continue
            next_due_at = await self._in_thread(log.next_due_at, now)
            # A new delivery, a handler that ended, and a stop end the pause.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(forget_at, next_due_at or forget_at) - now):
                    await self._wake.wait()

    async def _settle(self, log: DeliveryLog) -> None:
        if self._ended:
            ended = list(self._ended)
            await self._in_thread(log.settle, ended)
            del self._ended[: len(ended)]
            self._known.difference_update((call.path, call.id) for call in ended)

    async def _next(self, log: DeliveryLog, now: float) -> list[StoredDelivery]:
        found = [
            delivery
            for delivery in await self._in_thread(log.due, now, list(self._handlers))
            if (delivery.path, delivery.id) not in self._known
        ]
        self._known.update((delivery.path, delivery.id) for delivery in found)
        return found

    async def _handle(self, delivery: StoredDelivery) -> None:
        try:
            status = await _call(self._handlers[delivery.path], delivery)
        except Exception:
            # Whatever a handler raises: the delivery is tried again, and the log says why.
            _logger.exception("%s failed on delivery %s", delivery.path, delivery.id)
            status = 500
        due_at = None
        if status >= 300:
            # The exponent is bounded too: a power of some thousand is no float.
            pause = min(2.0 ** min(delivery.attempts, 30), LONGEST_PAUSE_SECONDS)
            due_at = time.time() + pause
            _logger.warning(
                "%s answered %d to delivery %s; next call in %.0f s",
                *(delivery.path, status, delivery.id, pause),
            )
        self._ended.append(EndedCall(path=delivery.path, id=delivery.id, due_at=due_at))
        self._wake.set()

    async def _in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await anyio.to_thread.run_sync(
            lambda: call(*args, **kwargs), limiter=self._one_thread
        )


async def _call(handler: ASGIApp, delivery: StoredDelivery) -> int:
    """The status of the handler's answer. Raises what the handler raises."""
    status = 500
    body: list[Message] = [{"type": "http.request", "body": delivery.body, "more_body": False}]

    async def receive() -> Message:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    headers = [(name.encode(), value.encode("latin-1")) for name, value in delivery.headers.items()]
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": delivery.path,
        "raw_path": delivery.path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "state": {"delivery_id": delivery.id},
    }
    await handler(scope, receive, send)
    return status
