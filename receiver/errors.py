"""Everything the receiver can refuse, in one tree.

ReceiverError            the message is for whoever started, called or configured the receiver
├── ProofMissing         answered 401
├── ProofWrong           answered 403
├── BodyTooLarge         answered 413
├── NotAnEvent           answered 422
├── NotWorking           answered 503
├── OpenToEveryone       refused at launch
├── AddressUnavailable   refused at launch
├── TunnelFailed         refused at launch
└── WebhookApiError      the hub refused a management call
    ├── WebhookNotFound
    └── NotAllowed
"""


class ReceiverError(Exception):
    """The receiver cannot go on; the message names the value, the cause and the next step."""

    status_code = 500


class ProofMissing(ReceiverError):
    """The header that carries the configured proof is not there."""

    status_code = 401


class ProofWrong(ReceiverError):
    """The proof is there and does not hold."""

    status_code = 403


class BodyTooLarge(ReceiverError):
    """More bytes than `ReceiverSettings.max_body_bytes`."""

    status_code = 413


class NotAnEvent(ReceiverError):
    """The body is proven, and is not the event that its sender documents."""

    status_code = 422


class NotWorking(ReceiverError):
    """A durable handler in an application whose lifespan was not entered."""

    status_code = 503


class OpenToEveryone(ReceiverError):
    """A bind beyond this machine without a secret."""


class AddressUnavailable(ReceiverError):
    """The host or the port cannot be listened on."""


class TunnelFailed(ReceiverError):
    """There is no public URL, or nothing that could give one."""


class WebhookApiError(ReceiverError):
    """The hub refused or could not answer a management call."""


class WebhookNotFound(WebhookApiError):
    """The hub knows no webhook of that id, or not for this token."""


class NotAllowed(WebhookApiError):
    """The token is missing, unknown, or may not manage webhooks."""
