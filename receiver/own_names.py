"""Refuses requests over loopback if their header `Host` names another host. Browsers send such
requests if the owner of a web page makes the page's own host name resolve to 127.0.0.1 (DNS
rebinding). If the requests were not refused, the page could read the answers.
"""

from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from receiver.errors import FromElsewhere
from serving.http.cross_site import other_host


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
    """An application in front of `app`. It answers 403 to requests that name another host. It does
    not check requests to the handlers, because the guard of each handler (`receiver/guard.py`)
    checks them.

    Args:
        names: Returns the host names of this receiver, without the names of loopback.
        handlers: The paths of the handlers.
    """

    def __init__(
        self, app: ASGIApp, *, names: Callable[[], Collection[str]], handlers: Collection[str]
    ) -> None:
        self._app = app
        self._names = names
        self._handlers = handlers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            # If another application mounts `app`, `path` begins with the path of the mount.
            path = scope["path"].removeprefix(scope.get("root_path", ""))
            try:
                if path not in self._handlers:
                    refuse_other_host(Headers(scope=scope), scope.get("server"), self._names())
            except FromElsewhere as refusal:
                if scope["type"] == "http":
                    answer = JSONResponse({"error": str(refusal)}, refusal.status_code)
                    await answer(scope, receive, send)
                else:
                    await send({"type": "websocket.close", "code": 1008})
                return
        await self._app(scope, receive, send)
