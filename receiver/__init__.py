"""Receives webhooks: checks the proof of each delivery, calls the handler, and answers. This
package can be used alone, as a library: `from receiver import WebhookPayload, webhook_endpoint`."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from receiver.server import WebhookPayload, WebhooksServer, webhook_endpoint

__all__ = ["WebhookPayload", "WebhooksServer", "webhook_endpoint"]


def __getattr__(name: str) -> Any:
    # Loaded at its first use, so that the hub can import records of this package without a server.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from receiver import server

    return getattr(server, name)
