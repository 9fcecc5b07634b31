"""What a receiver prints when it starts, and its landing page. The page lists the handlers with
their URLs, and shows how to create a webhook for each handler."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, Template

from receiver.handlers import RegisteredWebhook


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
        until = datetime.fromtimestamp(ends_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        lines.append(
            f"The public URL expires at {until}; the tunnel is renewed before that time. If the URL"
            " changes, the webhooks that post to the old URL are changed to the new URL."
        )
    return "\n".join(
        [*lines, f"Open {page}/ to see how to create a webhook that posts to these URLs."]
    )


def landing_page(url: str, webhooks: Sequence[RegisteredWebhook]) -> str:
    """The page as HTML. `url` is the server's URL without a slash at the end."""
    return _template().render(url=url, webhooks=webhooks)


_SENDERS = {"github": "GitHub", "gitea": "Gitea", "gitlab": "GitLab"}


@cache
def _template() -> Template:
    source = files("receiver").joinpath("landing.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"sender": lambda scheme: _SENDERS.get(scheme, scheme)}
    return environment.from_string(source)
