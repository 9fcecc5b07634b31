"""`WebhooksServer`: one POST route per handler, each behind its door, and a page on them."""

import os
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar, overload

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse
from starlette.types import ASGIApp

from receiver import listen
from receiver.answers import Answers
from receiver.door import Door, guarded
from receiver.durable import DurableDeliveries
from receiver.handlers import (
    REFUSALS,
    RegisteredWebhook,
    annotate,
    as_secrets,
    own_up,
    refuse_unreadable,
)
from receiver.history import History
from receiver.landing import landing_page
from receiver.settings import ReceiverSettings
from receiver.verify import Proof, ProofScheme

F = TypeVar("F", bound=Callable[..., Any])


class WebhooksServer:
    """Receives webhooks: `POST /webhooks/<name>` for each registered handler, a page at `/`.

    Args:
        ui: An ASGI application for everything that is no webhook, in place of the landing page.
        webhook_secret: What a delivery must prove to know, or several while one is being rotated;
            else the environment's `WEBHOOK_SECRET`. Without one, everyone who reaches the server
            is let in, and it listens on this machine only.
        settings: Where to listen, and the limits.
    """

    def __init__(
        self,
        ui: ASGIApp | None = None,
        webhook_secret: str | Sequence[str] | None = None,
        *,
        settings: ReceiverSettings | None = None,
    ) -> None:
        self.settings = settings or ReceiverSettings()
        self.registered_webhooks: dict[str, RegisteredWebhook] = {}
        self._secrets = as_secrets(webhook_secret or os.environ.get("WEBHOOK_SECRET"))
        self._history = History()
        self._answers = Answers(self.settings.remembered_deliveries)
        self._host: str | None = None
        self._running: tuple[uvicorn.Server, threading.Thread] | None = None
        self._durable = DurableDeliveries(
            self.settings.deliveries_path, shutdown_seconds=self.settings.shutdown_seconds
        )
        self.app = FastAPI(title="Webhooks", redoc_url=None, lifespan=self._lifespan)
        """To embed in another application, or to test without a socket. Durable handlers are called
        while its lifespan is entered."""
        self.app.exception_handler(RequestValidationError)(refuse_unreadable)
        self.app.exception_handler(Exception)(own_up)
        self.app.get("/health", include_in_schema=False)(_health)
        if ui is None:
            self.app.get("/", include_in_schema=False)(self._landing_page)
        else:
            self.app.router.default = ui

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
                is_durable=durable,
            )
            if self._host is not None and not secrets:
                listen.refuse_beyond_loopback(self._host, [route])
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
    ) -> str:
        """Listen, print the URL of each webhook, and serve until interrupted. Returns the URL.

        Returns at once, and serves from a thread, with `prevent_thread_lock` or inside a running
        event loop, as a notebook's. Launched again, the server moves to the new address.

        Args:
            prevent_thread_lock: Return at once.
            server_name: The host to listen on, in place of the settings'.
            server_port: The port, in place of the settings'.

        Raises:
            OpenToEveryone: The host is beyond this machine, and a handler has no secret.
            AddressUnavailable: The port is taken, or the host is not this machine's.
            ReceiverError: Another process has the file of the durable handlers' deliveries.
        """
        self.close()
        host = self.settings.host if server_name is None else server_name
        port = self.settings.port if server_port is None else server_port
        unproven = [
            hook.path for hook in self.registered_webhooks.values() if not hook.proof.secrets
        ]
        if unproven:
            listen.refuse_beyond_loopback(host, unproven)
        self._durable.open()
        listening = listen.bind(host, port)
        url = self.settings.public_url or listen.url_of(listening, host)
        print(self._greeting(url.rstrip("/"), unproven), flush=True)

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
            listen.serve(server, listening)
            self._host = None
        return url

    def close(self) -> None:
        """Stop the server that serves from a thread, once its handlers are done. Idempotent."""
        if self._running is not None:
            server, thread = self._running
            server.should_exit = True
            thread.join()
            self._running = None
            self._host = None

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

    @asynccontextmanager
    async def _lifespan(self, _app: FastAPI) -> AsyncIterator[None]:
        async with self._durable.working():
            yield

    def _landing_page(self, request: Request) -> HTMLResponse:
        url = self.settings.public_url or str(request.base_url)
        return HTMLResponse(
            landing_page(
                url.rstrip("/"), list(self.registered_webhooks.values()), self._history.latest()
            )
        )

    def _greeting(self, url: str, unproven: Sequence[str]) -> str:
        lines = ["", "Webhooks are correctly setup and ready to use:"]
        lines += [f"  - POST {url}{path}" for path in self.registered_webhooks]
        if unproven:
            lines += [
                "Webhook secret is not defined. This means your webhook endpoints will be open to"
                f" everyone: {', '.join(unproven)}",
                "To add a secret, set `WEBHOOK_SECRET` as environment variable or pass it at"
                " initialization: `WebhooksServer(webhook_secret='my_secret', ...)`",
            ]
        return "\n".join([*lines, f"Open {url}/ to see how to create a webhook for them."])


async def _health() -> dict[str, str]:
    return {"status": "ok"}
