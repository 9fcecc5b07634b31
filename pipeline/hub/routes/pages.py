"""HTML pages for a person: the list of webhooks, and for each webhook its deliveries, with a button
that sends a delivery again.

A browser shows with a cookie that a person has logged in (`login.py`). A person may also have given
the browser the token by Basic authentication. The browser then adds it to a form that a page of
another site posts to the hub. So each form of these pages has a second token, which no other site
knows.
"""

import json
import secrets
from functools import cache
from importlib.resources import files
from urllib.parse import parse_qs

from jinja2 import Environment, Template
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from pipeline.hub.errors import Forbidden
from pipeline.hub.http_json import iso_time, read_body
from pipeline.hub.routes.activity import replay
from pipeline.hub.service import hub_of
from pipeline.hub.webhooks.activity import OutboxDelivery, list_deliveries
from pipeline.hub.webhooks.store import StoredWebhook, get_webhook, list_webhooks

PAGES = "/settings/webhooks"
NUM_SHOWN = 50

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
}
_form_token = secrets.token_urlsafe(32)


def routes() -> list[Route]:
    return [
        Route(PAGES, show_all, methods=["GET"]),
        Route(f"{PAGES}/{{id}}", show, methods=["GET"]),
        Route(f"{PAGES}/{{id}}/replay", send_again, methods=["POST"]),
    ]


async def show_all(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> list[StoredWebhook]:
        with hub.database.read() as connection:
            return list_webhooks(connection)

    found = await run_in_threadpool(read)
    return HTMLResponse(_template().render(webhooks=found), headers=HEADERS)


async def show(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> tuple[StoredWebhook, list[OutboxDelivery]]:
        with hub.database.read() as connection:
            webhook = get_webhook(connection, request.path_params["id"])
            found = list_deliveries(connection, webhook.id, status=None, limit=NUM_SHOWN)
            return webhook, list(found)

    webhook, deliveries = await run_in_threadpool(read)
    page = _template().render(webhook=webhook, deliveries=deliveries, form_token=_form_token)
    return HTMLResponse(page, headers=HEADERS)


async def send_again(request: Request) -> Response:
    """Sends a delivery again. Raises Forbidden if the form does not have the second token, which
    only the pages of this hub have."""
    fields = parse_qs((await read_body(request)).decode("latin-1"))
    if not secrets.compare_digest(fields.get("token", [""])[0].encode(), _form_token.encode()):
        raise Forbidden(
            "This form does not come from a page of this hub, or the hub has restarted after the "
            "page was loaded: load the page again."
        )
    id = request.path_params["id"]
    delivery_id = fields.get("delivery", [""])[0]
    await run_in_threadpool(replay, hub_of(request), id, delivery_id, force="force" in fields)
    return RedirectResponse(request.url.path.removesuffix("/replay"), status_code=303)


def _indented(payload: str) -> str:
    return json.dumps(json.loads(payload), indent=2, ensure_ascii=False)


@cache
def _template() -> Template:
    source = files("pipeline.hub.routes").joinpath("webhooks.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["utc"] = iso_time
    environment.filters["indented"] = _indented
    return environment.from_string(source)
