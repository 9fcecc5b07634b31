"""Remembers the responses to the latest deliveries, so that a repeated delivery is not handled
twice.

The responses are only in memory and are lost when the process ends. If a handler needs something
after that, the handler must store it itself.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Response

_CachedResponse = tuple[int, tuple[tuple[bytes, bytes], ...], bytes]
"""Status, headers and body. They are kept as a tuple instead of a `Response`, because the garbage
collector skips tuples of bytes. In a large cache, it would have to look at every `Response`."""


class IdempotencyCache:
    """Holds at most `capacity` responses, and drops the oldest responses first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._responses: OrderedDict[
            Hashable, _CachedResponse | asyncio.Future[_CachedResponse | None]
        ] = OrderedDict()

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """The response that an earlier call gave for `key`. If there is none, run `call` now.

        Concurrent calls for the same key wait for the first call. Only 2xx responses are cached.
        Any other response means that the delivery failed, so the sender's next attempt must reach
        the handler.
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
    """A copy of the first response, but without its background tasks, which have already run."""
    status, headers, body = cached
    response = Response(body, status_code=status)
    response.raw_headers = list(headers)
    return response
