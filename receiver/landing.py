"""The landing page: what is registered, where, and how to create a webhook for it."""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from jinja2 import Environment, Template

from receiver.handlers import RegisteredWebhook


def landing_page(url: str, webhooks: Sequence[RegisteredWebhook]) -> str:
    """HTML that reads well without its style sheet. `url` is the server's, without a slash."""
    return _template().render(url=url, webhooks=webhooks)


@cache
def _template() -> Template:
    source = files("receiver").joinpath("landing.html").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
