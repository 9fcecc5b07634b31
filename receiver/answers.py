"""The answers of the latest deliveries, so that one that is repeated is not handled twice.

In memory: it ends with the process. What must outlive it is the handler's to store.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Response

_Kept = tuple[int, tuple[tuple[bytes, bytes], ...], bytes]
"""Status, headers and body. Not the response: of tuples of bytes, however many, the collector of
garbage looks at none."""


class Answers:
    """At most `capacity` answers; the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[Hashable, _Kept | asyncio.Future[_Kept | None]] = OrderedDict()

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """`call`'s answer, or the one that it gave for `key` before.

        Concurrent calls for one key wait for the first. An answer that is no 2xx is not kept: its
        delivery failed, and the sender's next attempt is handled anew.
        """
        while (earlier := self._answers.get(key)) is not None:
            kept = earlier if isinstance(earlier, tuple) else await asyncio.shield(earlier)
            if kept is not None:
                return _response(kept)
        answering: asyncio.Future[_Kept | None] = asyncio.get_running_loop().create_future()
        self._answers[key] = answering
        kept = None
        try:
            answer = await call()
            if answer.status_code < 300 and hasattr(answer, "body"):
                kept = answer.status_code, tuple(answer.raw_headers), bytes(answer.body)
            return answer
        finally:
            answering.set_result(kept)
            if self._answers.get(key) is answering:
                if kept is None:
                    del self._answers[key]
                else:
                    self._answers[key] = kept
            while len(self._answers) > self._capacity:
                self._answers.popitem(last=False)


def _response(kept: _Kept) -> Response:
    """Without the background tasks that the handler attached: those ran once."""
    status, headers, body = kept
    response = Response(body, status_code=status)
    response.raw_headers = list(headers)
    return response
