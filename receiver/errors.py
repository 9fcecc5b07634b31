"""The errors of the receiver, as a tree. The text beside most errors says what happens when this
error is raised. A number is the HTTP status of the answer to the sender. The *proof* of a request
is its secret or its signature.

ReceiverError            the base class; the message is for a person
├── ProofMissing         answered 401
├── ProofWrong           answered 403
├── NotAnEvent           answered 422
├── NoJobStore           answered 500
├── OpenToEveryone       the server is not started, or the handler is not added
├── AddressUnavailable   the server is not started
├── TunnelFailed         the server is not started
└── WebhookApiError      a call that manages webhooks on a hub failed
    ├── WebhookNotFound
    └── NotAllowed
"""


class ReceiverError(Exception):
    """The receiver refuses a request, cannot start, or cannot use a file, a hub or a tunnel."""

    status_code = 500
    """The HTTP status of the answer, if this error refuses a request."""


class ProofMissing(ReceiverError):
    """The request lacks a header that its proof needs."""

    status_code = 401


class ProofWrong(ReceiverError):
    """The secret or the signature is wrong."""

    status_code = 403


class NotAnEvent(ReceiverError):
    """The proof is valid, but the header with the event's name is missing, or the body is not an
    event in the sender's documented format."""

    status_code = 422


class NoJobStore(ReceiverError):
    """`launch_job` finds no store to which it could submit the job."""


class OpenToEveryone(ReceiverError):
    """Other machines could call a handler that has no secret."""


class AddressUnavailable(ReceiverError):
    """The server (a receiver or the hub) cannot listen on this host or port, or an environment
    variable that names the host or the port has no valid value."""


class TunnelFailed(ReceiverError):
    """The tunnel cannot be opened, or no tunnel is configured."""


class WebhookApiError(ReceiverError):
    """A call that manages webhooks failed: the hub refused it, could not be reached, or gave an
    answer that cannot be read."""


class WebhookNotFound(WebhookApiError):
    """The hub has no webhook with this id, or does not let the owner of the token see it."""


class NotAllowed(WebhookApiError):
    """The token is missing or unknown, or may not manage webhooks."""
