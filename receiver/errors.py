"""The errors of the receiver, in one tree.

ReceiverError            the message is for the person who runs or configures the receiver
├── ProofMissing         answered 401
├── ProofWrong           answered 403
├── FromElsewhere        answered 403
├── BodyTooLarge         answered 413
├── NotAnEvent           answered 422
├── WorkerNotRunning     answered 503
├── OpenToEveryone       refused at launch
├── AddressUnavailable   refused at launch
├── TunnelFailed         refused at launch
└── WebhookApiError      the hub refused a management call
    ├── WebhookNotFound
    └── NotAllowed
"""


class ReceiverError(Exception):
    """The receiver cannot continue. The message names the value, the cause and the next step."""

    status_code = 500


class ProofMissing(ReceiverError):
    """The request lacks the header that the configured proof needs."""

    status_code = 401


class ProofWrong(ReceiverError):
    """The secret or the signature is wrong."""

    status_code = 403


class FromElsewhere(ReceiverError):
    """The handler has no secret, and the request names another host or comes from a page of another
    site."""

    status_code = 403


class BodyTooLarge(ReceiverError):
    """The body has more bytes than `ReceiverSettings.max_body_bytes`."""

    status_code = 413


class NotAnEvent(ReceiverError):
    """The proof is valid, but the body is not an event in the sender's documented format."""

    status_code = 422


class WorkerNotRunning(ReceiverError):
    """Nothing would call the durable handler, because the application has not entered the server's
    lifespan."""

    status_code = 503


class OpenToEveryone(ReceiverError):
    """Other machines could call a handler that has no secret."""


class AddressUnavailable(ReceiverError):
    """The server cannot listen on this host or port."""


class TunnelFailed(ReceiverError):
    """The tunnel gave no public URL, or no tunnel is configured."""


class WebhookApiError(ReceiverError):
    """The hub refused a call that manages webhooks, could not be reached, or gave an answer that
    cannot be read."""


class WebhookNotFound(WebhookApiError):
    """The hub has no webhook with this id, or this token may not see the webhook."""


class NotAllowed(WebhookApiError):
    """The token is missing or unknown, or it may not manage webhooks."""
