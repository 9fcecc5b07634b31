"""Receives webhooks. A *delivery* is one request that a hub or another sender posts to the URL of a
webhook. The receiver checks the delivery's *proof* (a secret or a signature), calls the *handler*
(a function of the user), and answers the sender. A handler that must not lose a delivery launches a
job (`launch_job`).

This package can be used alone, as a library: `from receiver import WebhookPayload,
webhook_endpoint`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from receiver.payload import WebhookPayload
    from receiver.server import launch_job, webhook_endpoint
    from receiver.webhooks_server import WebhooksServer

__all__ = ["WebhookPayload", "WebhooksServer", "launch_job", "webhook_endpoint"]


def __getattr__(name: str) -> Any:
    # Import `receiver.server` at its first use. So a program that needs only another module of this
    # package, such as `receiver.payload`, does not load the server.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from receiver import server

    return getattr(server, name)
