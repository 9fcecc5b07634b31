"""Stores the deliveries of durable handlers in the *delivery log* (`receiver/delivery_log.py`). A
handler is *durable* if each of its deliveries is stored before the handler is called. After a
sender was answered, the *worker* (an asyncio task) calls the handler. If the call fails, the worker
calls the handler again after a pause.

A handler may be called several times for one delivery: if the process dies while the handler runs,
the next process calls the handler again. A handler gets the deliveries of one repository in the
order of their arrival. If a call fails, the later deliveries of the repository wait until the
failed delivery was handled or given up. A delivery is given up after `MAX_ATTEMPTS` failed calls:
it becomes a dead letter (`receiver/dead_letters.py`).
"""

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio.to_thread
from starlette.types import ASGIApp, Message

from receiver.batching import Batches
from receiver.delivery_log import DeliveryLog, HandlerResult, NewDelivery, StoredDelivery
from receiver.errors import WorkerNotRunning
from receiver.repository_queues import QueueKey, RepositoryQueues, queue_of

P = ParamSpec("P")
R = TypeVar("R")

_logger = logging.getLogger(__name__)

MAX_RUNNING = 8
"""How many handlers may run at the same time."""
LONGEST_PAUSE_SECONDS = 600.0
"""After the first failed call, the pause before the next call is 1 s. It doubles after each further
failed call, up to this value."""
MAX_ATTEMPTS = 20
"""A delivery is given up after this many failed calls. With the pauses between them, the calls take
almost two hours."""
LOOK_SECONDS = 5.0
"""When no delivery waits in memory, the worker reads the delivery log at least this often. So the
worker finds dead letters that another process has queued to be handled again."""
FAILURE_CHARACTERS = 500
"""The description of a failure is cut to this length before it is stored."""
FORGET_EVERY_SECONDS = 3600.0
"""How often old deliveries are deleted from the log."""
QUIET_SECONDS, YIELD_SECONDS = 0.005, 0.1
"""Senders that wait for an answer have priority over calls of handlers. So before the worker calls
handlers, it waits until no delivery has arrived for QUIET_SECONDS. But it waits at most
YIELD_SECONDS."""


class DurableDeliveries:
    """The delivery log, and the worker, which calls handlers while the context `worker` is open.

    Each handler is an ASGI application for one path. The worker makes a request from the stored
    delivery, and calls the handler with this request.
    """

    def __init__(self, path: Path, *, shutdown_seconds: float) -> None:
        self._path = path
        self._shutdown_seconds = shutdown_seconds
        self._handlers: dict[str, ASGIApp] = {}
        self._log: DeliveryLog | None = None
        self._wake = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the worker; None unless the context `worker` is open."""
        self._is_stopping = False
        self._one_thread = anyio.CapacityLimiter(1)
        self._batches = Batches(self._store_deliveries)
        self._known: set[tuple[str, str]] = set()
        """The path and the id of each delivery in memory. Such a delivery waits for a call, is
        being handled, or has a result that is not stored yet."""
        self._queues = RepositoryQueues()
        self._running: set[asyncio.Task[None]] = set()
        self._results: list[HandlerResult] = []
        """The results of calls that are not stored yet."""
        self._unstored_failures: dict[tuple[str, str], QueueKey] = {}
        """The deliveries with a failed call that is not stored yet: path and id → queue. Until the
        failure is stored, the queue stays busy, so no later delivery overtakes the failed one."""

    def add_handler(self, path: str, handler: ASGIApp) -> None:
        """Add a handler. Any thread may call this method, even while the worker runs. Raises
        `ReceiverError` if the worker runs and the log cannot be opened."""
        if self._loop is not None:
            self._opened()
        self._handlers[path] = handler
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)

    def remove_handler(self, path: str) -> None:
        """Remove the handler of this path, if there is one. Any thread may call this method, even
        while the worker runs. The stored deliveries to this path wait until a handler is added."""
        self._handlers.pop(path, None)

    def open(self) -> None:
        """Open the log if there are handlers. Raises `ReceiverError` if the log cannot be opened,
        for example because another process has it open."""
        if self._handlers:
            self._opened()

    def close(self) -> None:
        """Close the log. Does nothing while the context `worker` is open, because this context
        closes the log when it ends."""
        if self._loop is None and self._log is not None:
            self._log.close()
            self._log = None

    async def accept(
        self, path: str, id: str, headers: dict[str, str], body: bytes, repository: str
    ) -> bool:
        """Store the delivery. Returns True if the delivery is new, and False if it is a repeat.
        Deliveries of one `repository` are handled in the order of their arrival. Raises
        `WorkerNotRunning` if the context `worker` is not open, and `sqlite3.Error` if the log
        cannot be written."""
        if self._loop is None:
            raise WorkerNotRunning(
                "This server cannot call its durable handlers, because its lifespan was not"
                " entered. The application that mounts the server must enter this lifespan:"
                " FastAPI(lifespan=server.lifespan)."
            )
        delivery = NewDelivery(path=path, id=id, headers=headers, body=body, repository=repository)
        return await self._batches.add(delivery)

    async def _store_deliveries(self, deliveries: Sequence[NewDelivery]) -> Sequence[bool]:
        are_new = await self._in_thread(self._opened().add, deliveries, time.time())
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._wake.set)
        return are_new

    @contextlib.asynccontextmanager
    async def worker(self) -> AsyncIterator[None]:
        """Call the handlers while this context is open. The deliveries may also come from an
        earlier process, which has stored but not handled them.

        On exit, wait up to `shutdown_seconds` for the handlers that still run, and then cancel
        these handlers. The next process calls them again.
        """
        if self._loop is not None:
            # The context is already open, because another server serves the same application.
            yield
            return
        self.open()
        # Make a new `asyncio.Event`. Such an object belongs to one event loop, and an earlier
        # launch may have used another event loop.
        self._wake = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._is_stopping = False
        worker = asyncio.create_task(self._run_worker())
        try:
            yield
        finally:
            # Ask the worker to end. Do not cancel it: its thread may be executing an SQL statement.
            # A cancelled worker would not wait for its thread, so the log might be closed during
            # the statement.
            self._is_stopping = True
            self._wake.set()
            await worker
            if self._running:
                _, late = await asyncio.wait(self._running, timeout=self._shutdown_seconds)
                for task in late:
                    task.cancel()
                if late:
                    await asyncio.wait(late)
            self._known.clear()
            self._queues.clear()
            self._loop = None
            if self._log is not None:
                try:
                    self._log.store_results(self._results)
                finally:
                    self._results = []
                    self._unstored_failures = {}
                    self._log.close()
                    self._log = None

    def _opened(self) -> DeliveryLog:
        if self._log is None:
            self._log = DeliveryLog(self._path)
        return self._log

    async def _run_worker(self) -> None:
        while not self._is_stopping:
            try:
                await self._call_due_handlers()
            except sqlite3.Error as error:
                # The usual cause is a full disk. Nothing is lost while the disk is full: the stored
                # deliveries stay in the file, and the results stay in memory until they can be
                # stored.
                _logger.error(
                    "%s cannot be used, so no handler is called; next try in 1 s: %s",
                    *(self._path, error),
                )
                await asyncio.sleep(1)
            except Exception:
                # Without this `except`, a mistake in this package would end the worker, and nobody
                # would notice: deliveries would still be stored, but no handler would be called.
                _logger.exception("the durable handlers are called again in 1 s, after this error:")
                await asyncio.sleep(1)

    async def _call_due_handlers(self) -> None:
        forget_at = 0.0
        queues = self._queues
        while not self._is_stopping:
            self._wake.clear()
            log = self._log
            if log is None:  # no durable handler is registered yet
                await self._wake.wait()
                continue
            await self._batches.wait_until_quiet(
                for_seconds=QUIET_SECONDS, within_seconds=YIELD_SECONDS
            )
            now = time.time()
            if now >= forget_at:
                await self._in_thread(log.forget, now)
                forget_at = now + FORGET_EVERY_SECONDS
            await self._store_results(log)
            if not queues.has_next():
                queues.extend(await self._read_due(log, now))
            while len(self._running) < MAX_RUNNING and (delivery := queues.take()) is not None:
                task = asyncio.create_task(self._handle_queue(delivery))
                self._running.add(task)
                task.add_done_callback(self._free_task)
            if queues.has_next():
                await self._wake.wait()
                continue
            next_due_at = await self._in_thread(log.next_due_at, now)
            # `_wake` is set when a delivery was stored, when a handler was added, when a call or a
            # task of calls has ended, and when the worker must stop. But nothing sets `_wake` when
            # a pause ends, when it is time to delete old deliveries, or when another process queues
            # a dead letter. So wait for `_wake` at most until `look_at`.
            look_at = min(forget_at, next_due_at or forget_at, now + LOOK_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_at - now):
                    await self._wake.wait()

    def _free_task(self, task: asyncio.Task[None]) -> None:
        """Let the worker start another task in place of this one, which has ended. Wake the worker
        only now: while `_running` is full, it would start nothing and wait again."""
        self._running.discard(task)
        self._wake.set()

    async def _store_results(self, log: DeliveryLog) -> None:
        if self._results:
            results = list(self._results)
            await self._in_thread(log.store_results, results)
            del self._results[: len(results)]
            self._known.difference_update((call.path, call.id) for call in results)
            for queue in [
                self._unstored_failures.pop((call.path, call.id), None) for call in results
            ]:
                if queue is not None:
                    self._queues.release(queue)

    async def _read_due(self, log: DeliveryLog, now: float) -> list[StoredDelivery]:
        found = [
            delivery
            for delivery in await self._in_thread(
                log.due, now, list(self._handlers), self._queues.busy_repositories()
            )
            if (delivery.path, delivery.id) not in self._known
        ]
        self._known.update((delivery.path, delivery.id) for delivery in found)
        return found

    async def _handle_queue(self, first: StoredDelivery) -> None:
        """Call the handler for the delivery `first`, and then for the other deliveries in the queue
        of `first`. Stop after a failed call, or when the queue is empty.

        This task does not store the results of its calls. The worker stores them, several results
        in one transaction.
        """
        queue, delivery = queue_of(first), first
        while await self._handle(delivery, queue):
            following = None if self._is_stopping else self._queues.take_next(queue)
            if following is None:
                break
            delivery = following

    async def _handle(self, delivery: StoredDelivery, queue: QueueKey) -> bool:
        """Call the handler once, and keep the result until the worker stores it. Returns whether
        the call succeeded. A call succeeds if the handler answers with a status below 300. If the
        handler was removed, drop the delivery and its queue from memory."""
        handler = self._handlers.get(delivery.path)
        if handler is None:
            dropped = [delivery, *self._queues.drop(queue)]
            self._known.difference_update((each.path, each.id) for each in dropped)
            self._queues.release(queue)
            return False
        failure = None
        try:
            status = await _call(handler, delivery)
            if status >= 300:
                failure = f"answered {status}"
        except (Exception, asyncio.CancelledError) as error:
            # A handler is the user's code and may raise anything, also the `CancelledError` of a
            # task of its own. Only a stop of the server cancels this task. Write the traceback to
            # the log, because the stored failure has only the name and the text of the error.
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            _logger.exception("%s failed on delivery %s", delivery.path, delivery.id)
            failure = f"{type(error).__name__}: {error}"[:FAILURE_CHARACTERS]
        if failure is None:
            self._results.append(HandlerResult(path=delivery.path, id=delivery.id))
        else:
            self._results.append(_failed_result(delivery, failure))
            # Later deliveries of this repository must not overtake the failed delivery. So drop the
            # later deliveries from memory, and keep the queue busy until the failure is stored.
            # Then the delivery log returns the dropped deliveries again, in the right order.
            self._unstored_failures[delivery.path, delivery.id] = queue
            dropped = self._queues.drop(queue)
            self._known.difference_update((each.path, each.id) for each in dropped)
        self._wake.set()
        return failure is None

    async def _in_thread(self, call: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        return await anyio.to_thread.run_sync(
            lambda: call(*args, **kwargs), limiter=self._one_thread
        )


def _failed_result(delivery: StoredDelivery, failure: str) -> HandlerResult:
    """The result of a failed call: either the handler is called again later, or the delivery is
    given up."""
    num_calls = delivery.attempts + 1
    if num_calls >= MAX_ATTEMPTS:
        _logger.error(
            "%s: delivery %s is given up after %d calls (%s). To handle it again, run"
            " `pipeline receiver replay` with this id.",
            *(delivery.path, delivery.id, num_calls, failure),
        )
        return HandlerResult(
            path=delivery.path, id=delivery.id, died_at=time.time(), failure=failure
        )
    pause = min(2.0**delivery.attempts, LONGEST_PAUSE_SECONDS)
    _logger.warning(
        "%s failed on delivery %s (%s); next call in %.0f s",
        *(delivery.path, delivery.id, failure, pause),
    )
    return HandlerResult(
        path=delivery.path, id=delivery.id, due_at=time.time() + pause, failure=failure
    )


async def _call(handler: ASGIApp, delivery: StoredDelivery) -> int:
    """Call the handler with the stored request. Returns the HTTP status of the answer. Raises any
    exception of the handler."""
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
