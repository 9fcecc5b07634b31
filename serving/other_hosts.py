"""Refuses requests over loopback whose header `Host` names another host (DNS rebinding,
`serving/http/cross_site.py`), so that a web page can read no answer of a server without a key."""

from collections.abc import Awaitable, Callable

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.cross_site import other_host
from serving.request_errors import wrong_host


class RefuseOtherHosts:
    """Middleware that refuses a request before any route sees it.

    Args:
        host: The address on which the server listens. It may be a name that leads to loopback.
        on_error: Returns the answer to a request that is refused.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str,
        on_error: Callable[[Request, Exception], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._names = {host.lower()}
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = other_host(Headers(scope=scope), scope.get("server"), self._names)
            if host is not None:
                answer = await self._on_error(Request(scope), wrong_host(host))
                await answer(scope, receive, send)
                return
        await self._app(scope, receive, send)
