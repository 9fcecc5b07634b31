"""Refuses requests that come through a tunnel, except `POST` requests to the handlers."""

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from serving.http.cross_site import other_host


def not_found() -> JSONResponse:
    """The answer to a stranger who may reach only the handlers. It is the same as for an unknown
    path, so that the stranger does not learn which paths exist."""
    return JSONResponse({"error": "Not Found"}, status_code=404)


class TunnelEntrance:
    """An application in front of `app`, for a receiver that has opened a tunnel.

    A request counts as coming through a tunnel in two cases:

    - It arrives at `port`. The receiver opens this port only for its own tunnel.
    - It arrives over loopback, but its header `Host` is neither a name of loopback nor one of
      `names`. Then the user has probably set up another tunnel, which leads to the receiver's usual
      port. This test is not certain, because a stranger can choose the `Host`.

    Args:
        port: The port to which the receiver's own tunnel leads.
        names: The host names at which the receiver listens.
        paths: The paths of the handlers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        port: int,
        names: Collection[str],
        paths: Collection[str],
    ) -> None:
        self._app = app
        self._port = port
        self._names = names
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (
            scope["type"] == "lifespan"
            or not self._came_through_tunnel(scope)
            or self._is_handler_call(scope)
        ):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await not_found()(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _came_through_tunnel(self, scope: Scope) -> bool:
        server = scope["server"]
        is_at_port = server is not None and server[1] == self._port
        return is_at_port or other_host(Headers(scope=scope), server, self._names) is not None

    def _is_handler_call(self, scope: Scope) -> bool:
        return (
            scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in self._paths
        )
