"""Decides who may send a request to a receiver, before the request reaches a route."""

from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from receiver.handlers import RegisteredWebhook
from serving.http.cross_site import is_loopback_name, named_host, other_host, other_site


class Entrance:
    """An application in front of `app`. It makes these checks, in this order:

    - Strangers may only send `POST` requests to the handlers. The answer to anything else is 404,
      so that they do not learn which paths exist. A request comes from a stranger if it arrives at
      the port that the receiver has opened for its tunnel, or if it names the public host.
    - A call of a handler that has a secret passes: the guard of the handler (`receiver/guard.py`)
      checks its proof.
    - A page of another site may not call a handler that has no secret.
    - A request over loopback must not name another host. Browsers send such requests if the owner
      of a web page makes the page's own host name resolve to 127.0.0.1 (DNS rebinding). The page
      could otherwise read the answers.

    Args:
        handlers: The paths of the handlers, with their records.
        local_names: Returns the host names at which the receiver listens, in lower case.
        public_name: Returns the host name of the public URL. Empty if there is no public URL.
        tunnel_port: Returns the port to which the receiver's own tunnel leads.
        has_public_page: Whether strangers may see the page too, as in a Space.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        handlers: Mapping[str, RegisteredWebhook],
        local_names: Callable[[], Collection[str]],
        public_name: Callable[[], str],
        tunnel_port: Callable[[], int | None],
        has_public_page: bool,
    ) -> None:
        self._app = app
        self._handlers = handlers
        self._local_names = local_names
        self._public_name = public_name
        self._tunnel_port = tunnel_port
        self._has_public_page = has_public_page

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await refusal(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers, server = Headers(scope=scope), scope.get("server")
        # If another application mounts `app`, `path` begins with the path of the mount.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        called = self._handlers.get(path) if scope.get("method") == "POST" else None
        if called is None and self._is_of_a_stranger(headers, server):
            return JSONResponse({"error": "Not Found"}, 404)
        if called is not None:
            if called.proof.secrets:
                return None
            if (site := other_site(headers)) is not None:
                return _forbidden(
                    f"A browser sent this request on behalf of {site}. A handler without a secret"
                    " refuses requests of other sites: set `WEBHOOK_SECRET`, or pass"
                    " `webhook_secret=`."
                )
        host = other_host(headers, server, {*self._local_names(), self._public_name()})
        if host is None:
            return None
        return _forbidden(
            f"{host!r} is not a name of this receiver: call 127.0.0.1 or localhost. If senders or"
            " browsers must use this name, set `public_url` under [receiver] (`--public-url`), and"
            " set a secret (`WEBHOOK_SECRET` or `webhook_secret=`)."
        )

    def _is_of_a_stranger(
        self, headers: Mapping[str, str], server: tuple[str, int | None] | None
    ) -> bool:
        if server is not None and server[1] is not None and server[1] == self._tunnel_port():
            return True
        name = named_host(headers)
        is_local = self._has_public_page or name in self._local_names() or is_loopback_name(name)
        return name != "" and name == self._public_name() and not is_local


def _forbidden(reason: str) -> JSONResponse:
    return JSONResponse({"error": reason}, 403)
