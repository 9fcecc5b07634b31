"""Remembers the responses to the latest deliveries. If a delivery is repeated, the sender gets the
remembered response, and the handler is not called again.

The responses are only in memory. After a restart of the process, a repeated delivery is handled
again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Response


class IdempotencyCache:
    """Holds at most `capacity` responses, and drops the oldest responses first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._responses: dict[Hashable, asyncio.Future[Response | None]] = {}

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """The cached response for `key`. If there is none, run `call` and cache its response.

        If an earlier call of `once` with the same key still runs, wait for its response. Streamed
        responses are not cached. Responses with a status of 300 or more are not cached either: the
        delivery failed, so `call` must run again when the sender repeats the delivery.
        """
        while (known := self._responses.get(key)) is not None:
            if (cached := await asyncio.shield(known)) is not None:
                return cached
        pending = self._responses[key] = asyncio.get_running_loop().create_future()
        cached = None
        try:
            response = await call()
            if response.status_code < 300 and hasattr(response, "body"):
                # The background tasks of the response are left out: they run only once.
                cached = Response(response.body, response.status_code)
                cached.raw_headers = response.raw_headers
            return response
        finally:
            pending.set_result(cached)
            if cached is None:
                self._responses.pop(key, None)
            while len(self._responses) > self._capacity:
                del self._responses[next(iter(self._responses))]
