"""Refuses requests over loopback if their header `Host` names another host. Browsers send such
requests if the owner of a web page makes the page's own host name resolve to 127.0.0.1 (DNS
rebinding). If the requests were not refused, the page could read the answers. This module also
keeps strangers who use the public host name away from everything but the handlers.
"""

from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from receiver.entrance import not_found
from receiver.errors import FromElsewhere
from serving.http.cross_site import named_host, other_host


def refuse_other_host(
    headers: Mapping[str, str], server: tuple[str, int | None] | None, names: Collection[str]
) -> None:
    """Raise `FromElsewhere` if the request names another host. `server` and `names` mean the same
    as in `other_host`."""
    host = other_host(headers, server, names)
    if host is not None:
        raise FromElsewhere(
            f"{host!r} is not a name of this receiver: call 127.0.0.1 or localhost. If senders or"
            " browsers must use this name, set `public_url` under [receiver] (`--public-url`), and"
            " set a secret (`WEBHOOK_SECRET` or `webhook_secret=`)."
        )


class OnlyOwnNames:
    """An application in front of `app`. It answers 403 to requests over loopback that name another
    host. For requests to the handlers, the guard of each handler (`receiver/guard.py`) makes this
    check instead. Requests that name the public host come from strangers, through a tunnel or a
    proxy of the user. To such requests, this application answers 404, except to `POST` requests to
    the handlers.

    Args:
        names: Returns the host names of this receiver. Names of loopback may be left out.
        public_name: Returns the host name that only strangers use. None if there is no such name,
            or if the page may be public too.
        handlers: The paths of the handlers.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        names: Callable[[], Collection[str]],
        public_name: Callable[[], str | None],
        handlers: Collection[str],
    ) -> None:
        self._app = app
        self._names = names
        self._public_name = public_name
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers = Headers(scope=scope)
        # If another application mounts `app`, `path` begins with the path of the mount.
        is_to_handler = scope["path"].removeprefix(scope.get("root_path", "")) in self._handlers
        if named_host(headers) == self._public_name():
            is_call = is_to_handler and scope.get("method") == "POST"
            return None if is_call else not_found()
        try:
            if not is_to_handler:
                refuse_other_host(headers, scope.get("server"), self._names())
        except FromElsewhere as refusal:
            return JSONResponse({"error": str(refusal)}, refusal.status_code)
        return None
