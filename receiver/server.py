"""What a receiver script imports: `webhook_endpoint`, which registers on one server that a script's
functions share, and `WebhooksServer` for one of its own.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, Protocol, TypeVar, cast, overload

from receiver import autostart
from receiver.payload import WebhookPayload
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer

__all__ = ["WebhookPayload", "WebhooksServer", "webhook_endpoint"]

P = ParamSpec("P")
R = TypeVar("R", covariant=True)


class Endpoint(Protocol[P, R]):
    """A decorated function: callable as before, and able to start the shared server."""

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
    durable: bool = False,
) -> Callable[[Callable[P, R]], Endpoint[P, R]]: ...


def webhook_endpoint(
    path: Any = None,
    *,
    webhook_secret: str | Sequence[str] | None = None,
    proof: ProofScheme | None = None,
    durable: bool = False,
) -> Any:
    """Register the decorated function on the one server that a script's functions share.

    The server starts when the script ends whose function it is, or which imports it from a module
    beside or below itself; elsewhere, as in a notebook, when `launch()` of a decorated function is
    called, with the arguments of `WebhooksServer.launch`.
    Parameters as for `WebhooksServer.add_webhook`. A notebook cell that is executed again replaces
    the function that it registered before.
    """
    if callable(path):
        return webhook_endpoint()(path)

    def register(handler: Callable[P, R]) -> Endpoint[P, R]:
        server = _shared_server()
        if autostart.is_interactive():
            for route, earlier in list(server.registered_webhooks.items()):
                if _is_redefined(earlier.handler, handler):
                    server.remove_webhook(route)
        server.add_webhook(path, webhook_secret=webhook_secret, proof=proof, durable=durable)(
            handler
        )
        if _is_of_the_script(handler):
            _start_when_the_script_ends()

        def launch(*args: Any, **kwargs: Any) -> str:
            _call_off_the_start()
            return server.launch(*args, **kwargs)

        endpoint = cast(Endpoint[P, R], handler)
        endpoint.launch = launch
        return endpoint

    return register


_server: WebhooksServer | None = None
_call_off: Callable[[], None] | None = None


def _shared_server() -> WebhooksServer:
    global _server
    if _server is None:
        _server = WebhooksServer()
    return _server


def _is_of_the_script(handler: Callable[..., Any]) -> bool:
    """A test runner, or a library that is imported, is another program's script or folder."""
    script = getattr(sys.modules["__main__"], "__file__", None)
    module = getattr(sys.modules[handler.__module__], "__file__", None)
    if script is None or module is None:
        return False
    return Path(module).resolve().is_relative_to(Path(script).resolve().parent)


def _start_when_the_script_ends() -> None:
    global _call_off
    if _call_off is None:
        _call_off = autostart.at_end_of_script(_shared_server().launch)


def _call_off_the_start() -> None:
    if _call_off is not None:
        _call_off()


def _is_redefined(earlier: Callable[..., Any], now: Callable[..., Any]) -> bool:
    return (earlier.__module__, earlier.__qualname__) == (now.__module__, now.__qualname__)
