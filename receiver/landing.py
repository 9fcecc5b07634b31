"""The landing page. It lists the handlers with their URLs, and shows how to create a webhook for
each handler."""

from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from importlib.resources import files

from jinja2 import Environment, Template

from receiver.handlers import RegisteredWebhook


def landing_page(url: str, webhooks: Sequence[RegisteredWebhook]) -> str:
    """The page as HTML. `url` is the server's URL without a slash at the end."""
    return _template().render(url=url, webhooks=webhooks)


def as_utc(at: float) -> str:
    """Seconds since the epoch as a date and time in UTC."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


_SENDERS = {"github": "GitHub", "gitea": "Gitea", "gitlab": "GitLab"}


def _sender(scheme: str) -> str:
    return _SENDERS.get(scheme, scheme)


@cache
def _template() -> Template:
    source = files("receiver").joinpath("landing.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"sender": _sender}
    return environment.from_string(source)
