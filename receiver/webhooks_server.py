"""`WebhooksServer`: a web server with one POST route per handler, and a landing page that lists the
handlers. `receiver/guard.py` checks each request to a handler. `measure` and `add_live_route`
add the routes with which other programs watch the receiver of a stack."""

import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from jinja2 import Template
from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jobs.errors import StoreError
from receiver import listen
from receiver.errors import OpenToEveryone
from receiver.guard import (
    REFUSALS,
    IdempotencyCache,
    RegisteredWebhook,
    annotate,
    answer_handler_error,
    guarded_route,
    health,
    refuse,
    refuse_unreadable,
)
from receiver.settings import ReceiverSettings, is_space, settings_of_this_process, state_dir
from receiver.tunnel import HubCredentials, PublicUrl, remembered_urls, tunnel_to_open
from receiver.verify import Proof, ProofScheme
from serving.http.server import (
    BodiesInFlight,
    Server,
    host_name,
    is_loopback_name,
    is_only_loopback,
    named_host,
    other_host,
    other_site,
)

if TYPE_CHECKING:
    from jobs.store import JobStore


class WebhooksServer:
    """Receives webhooks: `POST /webhooks/<name>` for each registered handler, and a page at `/`.

    Args:
        ui: A user interface that replaces the landing page: an ASGI application or a
            `gradio.Blocks`. This interface answers every path for which the server itself has no
            route.
        webhook_secret: The secret that a sender must know, or a list of secrets while a new secret
            replaces an old one. Default: the environment variable `WEBHOOK_SECRET`. If a handler
            has no secret, and other machines could reach the server, `launch` raises
            `OpenToEveryone`.
        settings: Where to listen, and the limits. `settings_of_this_process` says what is taken
            from the environment, for example in a Space of the Hugging Face Hub.
        hubs: The hubs whose webhooks the server updates. When its public URL changes, the server
            finds the webhooks that post to the old URL, and changes their URL to the new one.
        state_dir: The folder in which the server remembers its public URLs. Default: the state
            folder of the stack.
        secret_in_shell: The placeholder for the secret in the shell commands on the landing page.
    """

    def __init__(
        self,
        ui: Any = None,
        webhook_secret: str | Sequence[str] | None = None,
        *,
        settings: ReceiverSettings | None = None,
        hubs: Sequence[HubCredentials] = (HubCredentials(),),
        state_dir: Path | None = None,
        secret_in_shell: str = '"$WEBHOOK_SECRET"',
    ) -> None:
        self.settings = settings_of_this_process(settings)
        self.registered_webhooks: dict[str, RegisteredWebhook] = {}
        self._secret_in_shell = secret_in_shell
        self._webhook_secret = webhook_secret or os.environ.get("WEBHOOK_SECRET")
        self._bodies = BodiesInFlight(self.settings.max_body_bytes)
        self._cache = IdempotencyCache(self.settings.remembered_deliveries)
        self._host: str | None = None
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None
        self._hubs = hubs
        self._state_dir = state_dir
        self._public: PublicUrl | None = None
        self._tunnel_port: int | None = None
        self.app = FastAPI(title="Webhooks", redoc_url=None, lifespan=self.lifespan)
        """The ASGI application. If another application mounts this one, the other application must
        enter `lifespan`."""
        self.fastapi_app = self.app
        """The name that `huggingface_hub` uses. A script may add routes to the application before
        or after `launch`."""
        self.app.add_middleware(self._entrance)
        self.app.exception_handler(RequestValidationError)(refuse_unreadable)
        self.app.exception_handler(HTTPException)(refuse)
        self.app.exception_handler(Exception)(answer_handler_error)
        self.app.get("/health")(health)
        self._ui = None if ui is None else _application_of(ui)
        if self._ui is None:
            self.app.get("/", response_class=HTMLResponse)(self._landing_page)
        else:
            self.app.router.default = self._ui

    def add_webhook(
        self,
        path: Callable[..., Any] | str | None = None,
        *,
        webhook_secret: str | Sequence[str] | None = None,
        proof: ProofScheme | None = None,
        knows_repeats: bool = False,
    ) -> Any:
        """Register the decorated function as `POST /webhooks/<path>`. The function can still be
        called directly.

        FastAPI passes the function's arguments: a `WebhookPayload` (or another model), and the
        `Request` if the function has a parameter for it. The function's return value is the answer
        to the sender. A function without `async` runs in a thread.

        Args:
            path: The name of the route. Default: the function's name.
            webhook_secret: Replaces the server's secret for this function.
            proof: Replaces the setting `proof` for this function.
            knows_repeats: True if the function itself recognises repeated deliveries. The function
                is then called for repeated deliveries too. If False, the server keeps the answers
                of successful calls in memory (setting `remembered_deliveries`). If a delivery is
                repeated while its answer is kept, the sender gets this answer again, and the
                function is not called.

        Raises:
            ValueError: The path is already registered, or the secret cannot be used.
            OpenToEveryone: There is no secret, and other machines can already reach the running
                server.
        """
        if callable(path):
            return self.add_webhook()(path)

        def register(handler: Callable[..., Any]) -> Callable[..., Any]:
            route = f"/webhooks/{(path or handler.__name__).strip('/')}"
            if route in self.registered_webhooks:
                raise ValueError(f"Webhook {route} already exists.")
            given = webhook_secret or self._webhook_secret or ()
            secrets = (given,) if isinstance(given, str) else tuple(given)
            webhook = RegisteredWebhook(
                path=route,
                handler=handler,
                proof=Proof(scheme=proof or self.settings.proof, secrets=secrets),
                secret_in_shell=(
                    "SECRET-OF-THIS-HANDLER" if webhook_secret else self._secret_in_shell
                ),
                knows_repeats=knows_repeats,
            )
            if self._host is not None and not secrets:
                self._refuse_unproven(self._host, [route], is_public=self._public is not None)
            self._add_route(webhook)
            self.registered_webhooks[route] = webhook
            return handler

        return register

    def remove_webhook(self, path: str) -> None:
        """Remove the route `path`, a key of `registered_webhooks`."""
        del self.registered_webhooks[path]
        routes = self.app.router.routes
        routes[:] = [route for route in routes if getattr(route, "path", None) != path]
        self.app.openapi_schema = None

    def launch(
        self,
        prevent_thread_lock: bool = False,
        *,
        server_name: str | None = None,
        server_port: int | None = None,
        share: bool | str = False,
    ) -> str:
        """Listen, print the URL of each handler, and serve until interrupted. Returns the URL of
        the server: its public URL if it has one, or else its local URL.

        Inside a running event loop (as in a notebook), the server runs in a thread, and `launch`
        returns at once. A second call of `launch` stops the first server and starts a new one.

        Args:
            prevent_thread_lock: Serve in a thread, and return at once.
            server_name, server_port: Replace the host and the port of the settings.
            share: True opens the tunnel of the setting `tunnel`. A string is the command of another
                tunnel. With a tunnel, every handler needs a secret. In a Space, `share` is ignored,
                because a Space has a public URL.

        Raises:
            OpenToEveryone: Other machines could reach a handler that has no secret.
            TunnelFailed: `share` is True, but no tunnel and no `public_url` is configured. Or the
                tunnel cannot be opened.
            AddressUnavailable: The port is in use, or the host is not an address of this machine.
        """
        self.close()
        host = self.settings.host if server_name is None else server_name
        port = self.settings.port if server_port is None else server_port
        unproven = [
            hook.path for hook in self.registered_webhooks.values() if not hook.proof.secrets
        ]
        # A Space already has a public URL, so it needs no tunnel.
        tunnel = None if is_space() else tunnel_to_open(share, self.settings)
        if unproven:
            is_public = tunnel is not None or self.settings.public_url is not None
            self._refuse_unproven(host, unproven, is_public=is_public)
        sockets = [listen.bind(host, port)]
        try:
            self._make_public(tunnel, sockets, port)
        except BaseException:
            self._close_public_url()
            for one in sockets:
                one.close()
            raise
        local = listen.url_of(sockets[0], host)
        url = self._public_url() or local
        # The page is public in a Space only.
        page = url if is_space() else local
        print(_greeting(url, self.registered_webhooks, unproven, page=page), flush=True)

        server = Server(self.app, shutdown_seconds=self.settings.shutdown_seconds)
        self._host = host
        if prevent_thread_lock or listen.is_inside_event_loop():
            self._running = server, listen.serve_in_thread(server, *sockets)
            return url
        try:
            listen.serve(server, *sockets)
        finally:
            self._close_public_url()
            self._host = None
        return url

    @property
    def webhook_secret(self) -> str | Sequence[str] | None:
        """The secret of all handlers that have no secret of their own. A script cannot set this
        property, because handlers that are already registered would keep the old secret."""
        return self._webhook_secret

    def close(self) -> None:
        """Close the tunnel if one is open, and stop the server if it runs in a thread. Handlers
        that still run get `shutdown_seconds` to end. May be called more than once."""
        self._close_public_url()
        if self._running is not None:
            server, thread = self._running
            server.should_exit = True
            thread.join()
            self._running = None
            self._host = None

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """The lifespan of `ui`. A server that `launch` has started enters this context itself. An
        application that mounts `app` must enter the context."""
        if isinstance(self._ui, FastAPI):
            async with self._ui.router.lifespan_context(self._ui):
                yield
        else:
            yield

    def _make_public(self, tunnel: str | None, sockets: list[socket.socket], port: int) -> None:
        """Open the tunnel, or take the `public_url` of the settings, if there is one of the two. A
        tunnel gets a socket of its own, which is added to `sockets`."""
        address = ""
        if tunnel is not None:
            sockets.append(listen.bind("127.0.0.1", 0))
            self._tunnel_port = sockets[-1].getsockname()[1]
            address = f"127.0.0.1:{self._tunnel_port}"
        elif is_space() or self.settings.public_url is None:
            # The URL of a Space never changes, so webhooks that post to it never need an update.
            return
        self._public = PublicUrl(
            self.settings,
            remembered_urls(self._state_dir or state_dir(), port),
            self._hubs,
            tunnel=tunnel,
            address=address,
        )
        self._public.open()

    def _close_public_url(self) -> None:
        if self._public is not None:
            self._public.close()
        self._public = self._tunnel_port = None

    def _public_url(self) -> str | None:
        if self._public is not None and self._public.url is not None:
            return self._public.url
        return self.settings.public_url and self.settings.public_url.rstrip("/")

    def _entrance(self, app: ASGIApp) -> ASGIApp:
        """Middleware that refuses requests before they reach a route."""

        async def enter(scope: Scope, receive: Receive, send: Send) -> None:
            refusal = None if scope["type"] == "lifespan" else self._refusal(scope)
            await (refusal or app)(scope, receive, send)

        return enter

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        """The answer to a request that may not reach its route; None if it may.

        - A call of a handler that has a secret passes: the guard of the handler
          (`receiver/guard.py`) checks its proof.
        - Strangers may not do anything else. The answer is 404, so that they do not learn which
          paths exist. A request comes from a stranger if it arrives at the port that the receiver
          has opened for its tunnel, or if it names the public host. In a Space, the page is public.
        - A page of another site may not call a handler that has no secret.
        - A request over loopback must not name another host. Browsers send such requests if the
          owner of a web page makes the page's own host name resolve to 127.0.0.1 (DNS rebinding).
          The page could otherwise read the answers.
        """
        headers, server = Headers(scope=scope), scope.get("server")
        # If another application mounts this one, `path` begins with the path of the mount.
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        is_call = scope.get("method") == "POST" and path in self.registered_webhooks
        if is_call and self.registered_webhooks[path].proof.secrets:
            return None
        public_name = host_name(self._public_url() or "")
        local_names = {(self._host or "").lower(), self.settings.host.lower()}
        if is_space() or is_loopback_name(public_name):
            local_names.add(public_name)
        is_public = named_host(headers) == public_name and public_name not in ("", *local_names)
        if is_public or (server is not None and server[1] == (self._tunnel_port or -1)):
            return JSONResponse({"error": "Not Found"}, 404)
        reason = None
        if is_call and (site := other_site(headers)) is not None:
            reason = (
                f"A browser sent this request on behalf of {site}. A handler without a secret"
                " refuses requests of other sites: set `WEBHOOK_SECRET`, or pass `webhook_secret=`."
            )
        elif (host := other_host(headers, server, local_names)) is not None:
            reason = (
                f"{host!r} is not a name of this receiver: call 127.0.0.1 or localhost. If senders"
                " or browsers must use this name, set `public_url` under [receiver]"
                " (`--public-url`), and set a secret (`WEBHOOK_SECRET` or `webhook_secret=`)."
            )
        return None if reason is None else JSONResponse({"error": reason}, 403)

    @staticmethod
    def _refuse_unproven(host: str, unproven: Sequence[str], *, is_public: bool) -> None:
        if is_public:
            where = " In a Space, add `WEBHOOK_SECRET` to its secrets." if is_space() else ""
            raise OpenToEveryone(
                "Everyone can reach a public URL, but there is no secret for"
                f" {', '.join(unproven)}: set `WEBHOOK_SECRET`, or pass `webhook_secret=`.{where}"
            )
        try:
            is_closed = is_only_loopback(host)
        except OSError as error:
            raise listen.no_address(host, error) from error
        if not is_closed:
            raise OpenToEveryone(
                f"Other machines can reach {host or 'every address of this machine'}, and there is"
                f" no secret for {', '.join(unproven)}. Set `WEBHOOK_SECRET`, pass"
                " `webhook_secret=`, or listen only on 127.0.0.1."
            )

    def _add_route(self, webhook: RegisteredWebhook) -> None:
        annotate(webhook.handler)
        guarded = guarded_route(webhook, self.settings, self._bodies, self._cache)
        self.app.router.add_api_route(
            webhook.path,
            webhook.handler,
            methods=["POST"],
            responses=REFUSALS,
            route_class_override=guarded,
        )

    def _landing_page(self, request: Request) -> HTMLResponse:
        # `base_url` is the URL of the outermost application. If the outermost application mounts
        # this application at a path, this application's URL ends in the path of the mount, which
        # is `root_path`.
        here = request.base_url.replace(path=request.scope.get("root_path", ""))
        url = self._public_url() or str(here)
        webhooks = list(self.registered_webhooks.values())
        page = _page_template().render(url=url.rstrip("/"), webhooks=webhooks, senders=_SENDERS)
        return HTMLResponse(page)


def _application_of(ui: Any) -> ASGIApp:
    """The application that serves `ui`. If it is a FastAPI, the caller must enter its lifespan."""
    # Do not import gradio to find out, because it may not be installed.
    if any(f"{kind.__module__}.".startswith("gradio.") for kind in type(ui).__mro__):
        import gradio

        # Mount the interface in a separate application. If it were mounted at "/" of the server's
        # own application, it would hide the routes that a script adds later.
        mounted: FastAPI = gradio.mount_gradio_app(FastAPI(), ui, path="/")
        return mounted
    if not callable(ui):
        raise TypeError(f"ui is a {type(ui).__name__}: pass an ASGI application or a gradio.Blocks")
    application: ASGIApp = ui
    return application


def _greeting(
    url: str,
    paths: Iterable[str],
    unproven: Sequence[str],
    *,
    page: str,
) -> str:
    """The text to print.

    Args:
        url: The URL at which senders reach the server, without a slash at the end.
        paths: The paths of all handlers.
        unproven: The paths of the handlers without a secret.
        page: The URL of the landing page, without a slash at the end.
    """
    lines = ["", "Webhooks are correctly setup and ready to use:"]
    lines += [f"  - POST {url}{path}" for path in paths]
    if unproven:
        lines += [
            "These webhooks have no secret, so every program on this machine can call them:"
            f" {', '.join(unproven)}",
            "To add a secret, set `WEBHOOK_SECRET` as environment variable or pass it at"
            " initialization: `WebhooksServer(webhook_secret='my_secret', ...)`",
        ]
    return "\n".join(
        [*lines, f"Open {page}/ to see how to create a webhook that posts to these URLs."]
    )


_SENDERS = {"github": "GitHub", "gitea": "Gitea", "gitlab": "GitLab"}


@cache
def _page_template() -> Template:
    source = files("receiver").joinpath("landing.html").read_text(encoding="utf-8")
    template: Template = Template(source, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return template


def measure(server: WebhooksServer) -> None:
    """Count the requests to the handlers, and add the route `/metrics`."""
    registry = CollectorRegistry()
    requests = Counter(
        "receiver_requests",
        "Requests by path and HTTP status, including refused requests",
        ["path", "status"],
        registry=registry,
    )

    def measured(app: ASGIApp) -> ASGIApp:
        async def call(scope: Scope, receive: Receive, send: Send) -> None:
            path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
            if path not in server.registered_webhooks:
                await app(scope, receive, send)
                return

            # If the handler raises an error, Starlette answers 500, after this function has ended.
            status = 500

            async def send_noting_status(message: Message) -> None:
                nonlocal status
                status = message.get("status", status)
                await send(message)

            try:
                await app(scope, receive, send_noting_status)
            finally:
                requests.labels(path, status).inc()

        return call

    server.app.add_middleware(measured)

    @server.app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


def add_live_route(app: FastAPI, store: "JobStore") -> None:
    """Add the route `/live`, which reads the job store before it answers. `pipeline up` requests
    this route again and again, and restarts the receiver if there is no answer for some time. Call
    this function before the app serves requests.

    If the store fails, the answer has status 200 and names the error. If the answer had status 503,
    `pipeline up` would restart the receiver, but a restart does not repair a database.
    """

    @app.get("/live")
    def alive() -> dict[str, str]:
        try:
            store.list(limit=1)
        except StoreError as error:
            return {"status": "ok", "database": str(error)}
        return {"status": "ok"}
