"""HTML pages for a person: the list of webhooks, and for each webhook its deliveries.

The browser asks for a user name, which may be any text, and for a token. It then sends the token
with every request to the hub, also with one that a page of another site causes. Such a request
changes nothing: `check_site` refuses it.
"""

import json
from pathlib import Path

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response
from starlette.templating import Jinja2Templates

from pipeline.hub.http_json import iso_time
from pipeline.hub.service import HubOf, person
from pipeline.hub.webhooks import get_webhook, list_deliveries, list_webhooks

NUM_SHOWN = 50

HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; style-src 'unsafe-inline'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "same-origin",
}

router = APIRouter(prefix="/settings/webhooks", dependencies=[Depends(person)])


@router.get("")
def show_all(request: Request, hub: HubOf) -> Response:
    with hub.database.read() as connection:
        facts = {"webhooks": list_webhooks(connection)}
    return _templates.TemplateResponse(request, "webhooks.html", facts, headers=HEADERS)


@router.get("/{id}")
def show(request: Request, hub: HubOf, id: str) -> Response:
    with hub.database.read() as connection:
        facts = {
            "webhook": get_webhook(connection, id),
            "deliveries": list_deliveries(connection, id, limit=NUM_SHOWN),
        }
    return _templates.TemplateResponse(request, "webhooks.html", facts, headers=HEADERS)


def _indented(payload: str) -> str:
    return json.dumps(json.loads(payload), indent=2, ensure_ascii=False)


_templates = Jinja2Templates(Path(__file__).parent)
_templates.env.filters |= {"utc": iso_time, "indented": _indented}
