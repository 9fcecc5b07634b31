"""The answers of the latest deliveries, so that one that is repeated is not handled twice.

In memory: it ends with the process. What must outlive it is the handler's to store.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable

from fastapi import Response


class Answers:
    """At most `capacity` answers; the oldest go first."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._answers: OrderedDict[Hashable, asyncio.Future[Response | None]] = OrderedDict()

    async def once(self, key: Hashable, call: Callable[[], Awaitable[Response]]) -> Response:
        """`call`'s answer, or the one that it gave for `key` before.

        Concurrent calls for one key wait for the first. An answer that is no 2xx is not kept: its
        delivery failed, and the sender's next attempt is handled anew.
        """
        while (earlier := self._answers.get(key)) is not None:
            answer = await asyncio.shield(earlier)
            if answer is not None:
                return _copy(answer)
        answering: asyncio.Future[Response | None] = asyncio.get_running_loop().create_future()
        self._answers[key] = answering
        try:
            answer = await call()
            if answer.status_code < 300 and hasattr(answer, "body"):
                answering.set_result(_copy(answer))
            return answer
        finally:
            if not answering.done():
                if self._answers.get(key) is answering:
                    del self._answers[key]
                answering.set_result(None)
            while len(self._answers) > self._capacity:
                self._answers.popitem(last=False)


def _copy(answer: Response) -> Response:
    """Without the background tasks that the handler attached: those ran once."""
    copy = Response(bytes(answer.body), status_code=answer.status_code)
    copy.raw_headers = list(answer.raw_headers)
    return copy
