"""`WebhooksServer`: one POST route per handler, each behind its door, and a page on them."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, overload

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.exceptions import HTTPException

from receiver import listen
from receiver.answers import Answers
from receiver.door import Door, guarded
from receiver.durable import DurableDeliveries
from receiver.errors import OpenToEveryone
from receiver.greeting import greeting
from receiver.handlers import (
    REFUSALS,
    RegisteredWebhook,
    annotate,
    as_secrets,
    own_up,
    refuse,
    refuse_unreadable,
)
from receiver.history import History
from receiver.landing import landing_page
from receiver.moved_webhooks import Hub
from receiver.settings import ReceiverSettings, settings_of_the_environment
from receiver.share import FixedUrl, open_tunnel, remembered_urls, tunnel_to_open
from receiver.tunnel import Tunnel
from receiver.ui import application_of
from receiver.verify import Proof, ProofScheme

if TYPE_CHECKING:
    from receiver.ui import Ui

F = TypeVar("F", bound=Callable[..., Any])


class WebhooksServer:
    """Receives webhooks: `POST /webhooks/<name>` for each registered handler, a page at `/`.

    Args:
        ui: For everything that is no webhook, in place of the landing page: an ASGI application,
            the path of a folder with an `index.html`, or a `gradio.Blocks`.
        webhook_secret: What a delivery must prove to know, or several while one is being rotated;
            else the environment's `WEBHOOK_SECRET`. Without one, everyone who reaches the server
            is let in, and it listens on this machine only.
        settings: Where to listen, and the limits; else the defaults, on the environment's
            `GRADIO_SERVER_NAME` and `GRADIO_SERVER_PORT`.
        hubs: Where webhooks that point to a public URL of this server are kept up to date.
        secret_in_shell: How the page's commands write `webhook_secret`.
    """

    def __init__(
        self,
        ui: "Ui | None" = None,
        webhook_secret: str | Sequence[str] | None = None,
        *,
        settings: ReceiverSettings | None = None,
        hubs: Sequence[Hub] = (Hub(),),
        secret_in_shell: str = '"$WEBHOOK_SECRET"',
    ) -> None:
        self.settings = settings or settings_of_the_environment()
        self.registered_webhooks: dict[str, RegisteredWebhook] = {}
        self._secret_in_shell = secret_in_shell
        self._secrets = as_secrets(webhook_secret or os.environ.get("WEBHOOK_SECRET"))
        self._history = History()
        self._answers = Answers(self.settings.remembered_deliveries)
        self._host: str | None = None
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None
        self._hubs = hubs
        self._way_in: Tunnel | FixedUrl | None = None
        self._durable = DurableDeliveries(
            self.settings.deliveries_path, shutdown_seconds=self.settings.shutdown_seconds
        )
        self.app = FastAPI(title="Webhooks", redoc_url=None, lifespan=self.lifespan)
        """To embed in another application, or to test without a socket. One that mounts it enters
        `lifespan` too, as `FastAPI(lifespan=server.lifespan)` does."""
        self.app.exception_handler(RequestValidationError)(refuse_unreadable)
        self.app.exception_handler(HTTPException)(refuse)
        self.app.exception_handler(Exception)(own_up)
        self.app.get("/health")(_health)
        self._ui = None if ui is None else application_of(ui)
        if self._ui is None:
            self.app.get("/", response_class=HTMLResponse)(self._landing_page)
        else:
            self.app.router.default = self._ui

    @overload
    def add_webhook(self, path: F) -> F: ...
    @overload
    def add_webhook(
        self,
        path: str | None = None,
        *,
        webhook_secret: str | Sequence[str] | None = None,
        proof: ProofScheme | None = None,
        durable: bool = False,
    ) -> Callable[[F], F]: ...

    def add_webhook(
        self,
        path: Any = None,
        *,
        webhook_secret: str | Sequence[str] | None = None,
        proof: ProofScheme | None = None,
        durable: bool = False,
    ) -> Any:
        """Register the decorated function, which stays callable, as `POST /webhooks/<path>`.

        Its parameters are FastAPI's: a `WebhookPayload` (or another model), and the `Request` if it
        wants that. What it returns is the answer. A plain function runs in a thread.

        Args:
            path: The name of the route; the function's own by default.
            webhook_secret: In place of the server's.
            proof: In place of the settings'.
            durable: Store a delivery, answer 202, and call the handler until it succeeds, also
                after a restart. Such a handler takes a `WebhookPayload`.

        Raises:
            ValueError: The path is taken, or the secret does not fit the proof.
            OpenToEveryone: There is no secret, and the server listens beyond this machine already.
            ReceiverError: It is durable, and another process has the file of such deliveries.
        """
        if callable(path):
            return self.add_webhook()(path)

        def register(handler: F) -> F:
            route = f"/webhooks/{(path or handler.__name__).strip('/')}"
            if route in self.registered_webhooks:
                raise ValueError(f"Webhook {route} already exists.")
            secrets = as_secrets(webhook_secret) or self._secrets
            webhook = RegisteredWebhook(
                path=route,
                handler=handler,
                proof=Proof(scheme=proof or self.settings.proof, secrets=secrets),
                secret_in_shell="SECRET-OF-THIS-HANDLER"
                if as_secrets(webhook_secret)
                else self._secret_in_shell,
                is_durable=durable,
            )
            if self._host is not None and not secrets:
                self._refuse_unproven(self._host, [route], is_public=self._way_in is not None)
            self._add_route(webhook)
            self.registered_webhooks[route] = webhook
            return handler

        return register

    def remove_webhook(self, path: str) -> None:
        """Take the route `path`, as it stands in `registered_webhooks`, away."""
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
        """Listen, print the URL of each webhook, and serve until interrupted. Returns the URL.

        Returns at once, and serves from a thread, with `prevent_thread_lock` or inside a running
        event loop, as a notebook's. Launched again, the server moves to the new address.

        Args:
            prevent_thread_lock: Return at once.
            server_name: The host to listen on, in place of the settings'.
            server_port: The port, in place of the settings'.
            share: Open a tunnel with a public URL: the settings', or this one in its place, as
                `ssh://user@host` or a command. It needs a secret on every handler.

        Raises:
            OpenToEveryone: There is a way in from beyond this machine, and a handler has no secret.
            TunnelFailed: There is no tunnel to open, or it did not open.
            AddressUnavailable: The port is taken, or the host is not this machine's.
            ReceiverError: Another process has the file of the durable handlers' deliveries.
        """
        self.close()
        host = self.settings.host if server_name is None else server_name
        port = self.settings.port if server_port is None else server_port
        unproven = [
            hook.path for hook in self.registered_webhooks.values() if not hook.proof.secrets
        ]
        tunnel = tunnel_to_open(share, self.settings)
        remembered = remembered_urls(self.settings, port)
        if unproven:
            is_public = tunnel is not None or self.settings.public_url is not None
            self._refuse_unproven(host, unproven, is_public=is_public)
        self._durable.open()
        listening = listen.bind(host, port)
        if tunnel is not None:
            try:
                address = listen.address_of(listening, host)
                self._way_in = open_tunnel(tunnel, address, self.settings, remembered, self._hubs)
            except BaseException:
                listening.close()
                raise
        elif self.settings.public_url is not None:
            self._way_in = FixedUrl(self.settings.public_url, remembered, self._hubs)
        url = self._public_url() or listen.url_of(listening, host)
        public = None if self._way_in is None else self._way_in.public
        print(greeting(url, self.registered_webhooks, unproven, public), flush=True)

        config = uvicorn.Config(
            self.app,
            log_config=None,  # the process's own
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=self.settings.shutdown_seconds,
        )
        server = uvicorn.Server(config)
        self._host = host
        if prevent_thread_lock or listen.is_inside_event_loop():
            self._running = server, listen.serve_in_thread(server, listening)
        else:
            try:
                listen.serve(server, listening)
            finally:
                self._close_way_in()
            self._host = None
        return url

    def close(self) -> None:
        """Stop the server that serves from a thread, once its handlers are done. Idempotent."""
        self._close_way_in()
        if self._running is not None:
            server, thread = self._running
            server.should_exit = True
            thread.join()
            self._running = None
            self._host = None

    @asynccontextmanager
    async def lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        """While it is entered, durable handlers are called. `launch` does that by itself."""
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._durable.working())
            if isinstance(self._ui, FastAPI):
                await stack.enter_async_context(self._ui.router.lifespan_context(self._ui))
            yield

    def _close_way_in(self) -> None:
        if self._way_in is not None:
            self._way_in.close()
            self._way_in = None

    def _public_url(self) -> str | None:
        if self._way_in is not None and self._way_in.public is not None:
            return self._way_in.public.url
        return self.settings.public_url and self.settings.public_url.rstrip("/")

    @staticmethod
    def _refuse_unproven(host: str, unproven: Sequence[str], *, is_public: bool) -> None:
        if is_public:
            raise OpenToEveryone(
                f"A public URL lets everyone in, and there is no secret for {', '.join(unproven)}:"
                " set `WEBHOOK_SECRET`, or pass `webhook_secret=`."
            )
        listen.refuse_beyond_loopback(host, unproven)

    def _add_route(self, webhook: RegisteredWebhook) -> None:
        annotate(webhook.handler)
        door = Door(
            path=webhook.path,
            proof=webhook.proof,
            max_body_bytes=self.settings.max_body_bytes,
            body_timeout_seconds=self.settings.body_timeout_seconds,
            answers=self._answers,
            history=self._history,
            durable=self._durable if webhook.is_durable else None,
        )
        if webhook.is_durable:
            # An application that nobody can reach from outside: what is stored has passed the door.
            behind = FastAPI(openapi_url=None)
            behind.post(webhook.path)(webhook.handler)
            self._durable.add_handler(webhook.path, behind)
        self.app.router.add_api_route(
            webhook.path,
            webhook.handler,
            methods=["POST"],
            status_code=202 if webhook.is_durable else None,
            responses=REFUSALS,
            route_class_override=guarded(door),
        )

    def _landing_page(self, request: Request) -> HTMLResponse:
        # Where it is mounted, `base_url` is that of the outermost application.
        here = request.base_url.replace(path=request.scope.get("root_path", ""))
        url = self._public_url() or str(here)
        return HTMLResponse(
            landing_page(
                url.rstrip("/"), list(self.registered_webhooks.values()), self._history.latest()
            )
        )


async def _health() -> dict[str, str]:
    return {"status": "ok"}
