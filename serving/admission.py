"""Decides which requests are let in, and with which release, and reads their bodies.

`Admission` gives each request the live release: the release that answers new requests. A swap makes
another release live. During a swap, the barrier of `Admission` can hold new requests back. A
request keeps its release until the request ends, even if another release becomes live in the
meantime. All its calls come from the thread of the event loop. Nothing here calls an engine.
"""

import asyncio
import secrets
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.routing import APIRoute

from serving.http.server import JsonRequest
from serving.questions import Kind, Questions
from serving.request_errors import RequestError
from serving.tokenizer import ReleaseTokenizer
from serving.weights.release import Release


@dataclass(frozen=True, kw_only=True)
class Unserved:
    """A release that should be served but cannot be served, and the reasons."""

    id: str
    """`served.json` if this record is damaged, so that nobody knows the release."""
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.id} cannot be served: {'; '.join(self.reasons)}"


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedRelease:
    """A release that can answer requests, and what the server needs to use it."""

    release: Release
    folder: Path
    tokenizer: ReleaseTokenizer
    live_since: int = 0
    """When it became live, in Unix seconds. 0 before."""
    stands_in_for: Unserved | None = None
    """If this release is served as a substitute: the newer release that could not be served.
    Otherwise None."""
    context_length: int
    """The largest number of tokens in a sequence, counting the prompt and the new tokens: what the
    release allows, or less if the engine does not have the memory for it."""
    questions: Mapping[Kind, Questions] = field(default_factory=dict)
    """What the rows ask that it was trained on. Empty unless `ground` is "assist"."""

    @property
    def id(self) -> str:
        return self.release.id


class Admission:
    """Knows the live release and counts the requests of each release. At most `max_requests`
    requests may run or wait at once."""

    def __init__(self, max_requests: int, pipeline: str) -> None:
        self._max_requests = max_requests
        self._pipeline = pipeline
        self.live: LoadedRelease | None = None
        """The release for new requests. Only the swapper changes it."""
        self.num_waiting = 0
        """How many requests the barrier holds back."""
        self._in_flight: Counter[str] = Counter()
        self.open = asyncio.Event()
        """Set, except while the barrier (`closed`) holds requests back."""
        self.open.set()
        self._left = asyncio.Event()
        self.unserved: Unserved | None = None
        """The release that should be served, if the server could not serve it at its start. The
        server's answers use this value to say why no release is live. Once a release is live,
        ignore this value."""

    @property
    def num_in_flight(self) -> int:
        """How many requests have been given a release and have not ended."""
        return self._in_flight.total()

    async def enter(self) -> LoadedRelease:
        """The release for one request. When the request ends, pass this release to `leave`.

        Waits while the barrier is closed. Raises RequestError if too many requests run or wait, or
        if no release is live.
        """
        if self.num_in_flight + self.num_waiting >= self._max_requests:
            count = f"{self._max_requests} requests are running or waiting"
            raise RequestError(429, f"{count}; send the request again later")
        self.num_waiting += 1
        try:
            while not self.open.is_set():
                await self.open.wait()
        finally:
            self.num_waiting -= 1
        live = self.served()
        self._in_flight[live.id] += 1
        return live

    def served(self) -> LoadedRelease:
        """The live release. Raises RequestError if no release is live."""
        if self.live is not None:
            return self.live
        raise RequestError(
            503,
            f"{self._pipeline!r} has no release yet; push to its dataset, or swap a release in"
            if self.unserved is None
            else f"{self.unserved}; there is no substitute for it; run `pipeline releases verify`",
        )

    def leave(self, live: LoadedRelease) -> None:
        """Record that a request on this release has ended. Call this once for each `enter`."""
        self._in_flight[live.id] -= 1
        if not self._in_flight[live.id]:
            del self._in_flight[live.id]
        self._left.set()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Holds new requests back until the `with` block ends. Give every `await` in the block a
        time limit, because all new requests wait until the block ends."""
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()

    async def drained(self, release_id: str) -> None:
        """Wait until this release answers no request any more."""
        while release_id in self._in_flight:
            self._left.clear()
            await self._left.wait()


async def check_api_key(request: Request, *, key: str | None) -> None:
    """Raise RequestError 401 if there is a key and the request does not have it."""
    if key is not None and not _is_equal(_bearer_of(request, "the API key"), key):
        raise RequestError(401, "the token is not the API key")


async def check_swap_token(
    request: Request, *, admin_token: str, job_may_swap: Callable[[str], bool]
) -> None:
    """Raise RequestError 401 if the request has no token, and 403 if its token is neither
    `admin_token` nor one for which `job_may_swap` returns true."""
    given = _bearer_of(request, "the admin token or the token of a running job")
    if not _is_equal(given, admin_token) and not await run_in_threadpool(job_may_swap, given):
        raise RequestError(403, "the token is not the admin token or the token of a running job")


async def check_webhook_secret(request: Request, *, secret: str) -> None:
    """Raise RequestError 403 if the request does not have the secret as a webhook sends it."""
    if not _is_equal(request.headers.get("x-webhook-secret", ""), secret):
        raise RequestError(403, "X-Webhook-Secret is not the secret of this server")


def _is_equal(given: str, key: str) -> bool:
    """Takes the same time for a right and a wrong key, so that the time tells an attacker nothing
    about the key."""
    return secrets.compare_digest(given.encode(), key.encode())


def _bearer_of(request: Request, name: str) -> str:
    """The bearer token of a request. Raises RequestError 401 if the request has none. `name` says
    in the error message which token is needed, such as "the API key"."""
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        raise RequestError(401, f"{name} is needed: Authorization: Bearer …", code="missing_token")
    return given.strip()


def json_routes(check: Callable[[Request], Awaitable[None]]) -> type[APIRoute]:
    """A class of routes that first call `check`, and then read the body as JSON. They raise
    RequestError 400 if the content type is not JSON.

    `check` should raise an error if the client may not send this request. It runs first, so that
    such a client cannot make the server parse a body.
    """

    class JsonRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_json(request: Request) -> Response:
                await check(request)
                # For a page of another site, a browser sends JSON only after a CORS preflight
                # request, which this server can refuse. It sends some other types, or no type,
                # without a preflight. So if this server accepted these, every page that its user
                # opens could send requests to it.
                given = request.headers.get("content-type", "")
                kind = given.partition(";")[0].strip().lower()
                if request.method == "POST" and kind != "application/json":
                    reason = f"Content-Type must be application/json, not {given!r}."
                    raise RequestError(400, reason)
                return await handle(JsonRequest(request.scope, request.receive))

            return handle_json

    return JsonRoute
