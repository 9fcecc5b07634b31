"""The names that a receiver script imports.

A script decorates its functions with `webhook_endpoint`, which creates one server for all of them.
A script that needs its own server uses `WebhooksServer` instead.
"""

import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from receiver import autostart
from receiver.launching import launch_job
from receiver.payload import WebhookPayload
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer

__all__ = ["WebhookPayload", "WebhooksServer", "launch_job", "webhook_endpoint"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Endpoint(Protocol[P, R]):
    """A decorated function. It can still be called directly, and has a method `launch`, which
    starts the shared server."""

    launch: Callable[..., str]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


@overload
def webhook_endpoint(path: Callable[P, R]) -> Endpoint[P, R]: ...
@overload
def webhook_endpoint(
    path: str | None = None,
    *,
    webhook_secret: str | Sequence[str] | None = None,
    proof: ProofScheme | None = None,
) -> Callable[[Callable[P, R]], Endpoint[P, R]]: ...


def webhook_endpoint(
    path: Any = None,
    *,
    webhook_secret: str | Sequence[str] | None = None,
    proof: ProofScheme | None = None,
) -> Any:
    """Register the decorated function on the server that all functions of a script share. The
    parameters have the same meaning as in `WebhooksServer.add_webhook`.

    If the function is defined in the script's folder or in a folder below it, the server starts
    when the script ends. In all other cases, for example in a notebook, the user must call the
    method `launch` of a decorated function. `launch` takes the arguments of
    `WebhooksServer.launch`. If a notebook cell is executed again, its function replaces the earlier
    function of the same name.
    """
    if callable(path):
        return webhook_endpoint()(path)

    def register(handler: Callable[P, R]) -> Endpoint[P, R]:
        server = _shared_server()
        if autostart.is_interactive():
            for route, earlier in list(server.registered_webhooks.items()):
                if _is_redefined(earlier.handler, handler):
                    server.remove_webhook(route)
        server.add_webhook(path, webhook_secret=webhook_secret, proof=proof)(handler)
        if _is_of_the_script(handler):
            _autostart_at_end_of_script()

        def launch(*args: Any, **kwargs: Any) -> str:
            _cancel_autostart()
            return server.launch(*args, **kwargs)

        endpoint = cast(Endpoint[P, R], handler)
        endpoint.launch = launch
        return endpoint

    return register


_autostart_canceller: Callable[[], None] | None = None


@cache
def _shared_server() -> WebhooksServer:
    return WebhooksServer()


def _is_of_the_script(handler: Callable[..., Any]) -> bool:
    """Whether the handler is defined in the main script's folder or in a folder below it.

    If the handler is defined elsewhere, the main script is a program that only imports the handler,
    such as a test runner. When this program ends, no server may start.
    """
    script = getattr(sys.modules["__main__"], "__file__", None)
    module = getattr(sys.modules[handler.__module__], "__file__", None)
    if script is None or module is None:
        return False
    return Path(module).resolve().is_relative_to(Path(script).resolve().parent)


def _autostart_at_end_of_script() -> None:
    global _autostart_canceller
    if _autostart_canceller is None:
        _autostart_canceller = autostart.at_end_of_script(_shared_server().launch)


def _cancel_autostart() -> None:
    if _autostart_canceller is not None:
        _autostart_canceller()


def _is_redefined(earlier: Callable[..., Any], now: Callable[..., Any]) -> bool:
    return (earlier.__module__, earlier.__qualname__) == (now.__module__, now.__qualname__)
