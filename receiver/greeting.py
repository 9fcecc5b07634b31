"""What a receiver prints when it starts."""

from collections.abc import Iterable, Sequence

from receiver.landing import as_utc


def greeting(
    url: str,
    paths: Iterable[str],
    unproven: Sequence[str],
    ends_at: float | None,
    *,
    page: str,
) -> str:
    """The text to print.

    Args:
        url: The URL at which senders reach the server, without a slash at the end.
        paths: The paths of all handlers.
        unproven: The paths of the handlers without a secret.
        ends_at: When the public URL of the tunnel expires. None without a tunnel.
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
    if ends_at is not None:
        lines.append(
            f"The public URL expires at {as_utc(ends_at)}; the tunnel is renewed before that"
            " time. If the URL changes, the webhooks that post to the old URL are changed to the"
            " new URL."
        )
    return "\n".join(
        [*lines, f"Open {page}/ to see how to create a webhook that posts to these URLs."]
    )
