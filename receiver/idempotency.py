"""Remembers the responses to the latest deliveries. If a delivery is repeated, the sender gets the
remembered response, and the handler is not called again.

The responses are only in memory. After a restart of the process, a repeated delivery is handled
again.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Response

_CachedResponse = tuple[int, tuple[tuple[bytes, bytes], ...], bytes]
"""Status, headers and body. The cache holds tuples instead of `Response` objects, to save time: the
garbage collector skips tuples of bytes, but it would look through every `Response`."""


class IdempotencyCache:
    """Holds at most `capacity` responses, and drops the oldest responses first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._responses: OrderedDict[
            Hashable, _CachedResponse | asyncio.Future[_CachedResponse | None]
        ] = OrderedDict()

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """The cached response for `key`. If there is none, run `call` and cache its response.

        If an earlier call of `once` with the same key still runs, wait for its response. Streamed
        responses are not cached. Responses with a status of 300 or more are not cached either: the
        delivery failed, so `call` must run again when the sender repeats the delivery.
        """
        while (known := self._responses.get(key)) is not None:
            cached = known if isinstance(known, tuple) else await asyncio.shield(known)
            if cached is not None:
                return _response(cached)
        pending: asyncio.Future[_CachedResponse | None] = asyncio.get_running_loop().create_future()
        self._responses[key] = pending
        cached = None
        try:
            response = await call()
            if response.status_code < 300 and hasattr(response, "body"):
                cached = response.status_code, tuple(response.raw_headers), bytes(response.body)
            return response
        finally:
            pending.set_result(cached)
            if self._responses.get(key) is pending:
                if cached is None:
                    del self._responses[key]
                else:
                    self._responses[key] = cached
            while len(self._responses) > self._capacity:
                self._responses.popitem(last=False)


def _response(cached: _CachedResponse) -> Response:
    """The cached response. Its background tasks are left out, because they have already run."""
    status, headers, body = cached
    response = Response(body, status_code=status)
    response.raw_headers = list(headers)
    return response
