"""The pages of webhooks and their deliveries."""

import json
from typing import Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.console.page import Editor, Page, go, page
from pipeline.hub.routes import webhooks as api
from pipeline.hub.service import HubOf
from pipeline.hub.webhooks import get_webhook, list_deliveries, list_webhooks

NUM_SHOWN = 50

router = APIRouter(route_class=Page, prefix="/webhooks")


@router.get("")
def show_all(request: Request, hub: HubOf) -> Response:
    with hub.database.read() as connection:
        webhooks = list_webhooks(connection)
        found = list_deliveries(connection, limit=NUM_SHOWN)
    return page(request, "webhooks.html", webhooks=webhooks, deliveries=found)


@router.get("/{id}")
def show(request: Request, hub: HubOf, id: str) -> Response:
    with hub.database.read() as connection:
        webhook = get_webhook(connection, id)
        found = list_deliveries(connection, id, limit=NUM_SHOWN)
    for each in found:
        each["payload"] = json.dumps(json.loads(str(each["payload"])), indent=2, ensure_ascii=False)
    return page(request, "webhook.html", webhook=webhook, deliveries=found)


@router.post("")
def create(hub: HubOf, visitor: Editor) -> Response:
    pairs = [each.split(":", 1) for each in visitor.form.get("watched", "").split()]
    watched = [dict(zip(("type", "name"), pair, strict=False)) for pair in pairs]
    asked = api.WebhookRequest.model_validate({**visitor.form, "watched": watched})
    asked = api.checked(hub, visitor.identity, asked)
    with hub.database.write() as connection:
        created = api.create_webhook(connection, asked, hub.secret_key)
    return go(f"/webhooks/{created.id}")


@router.post("/{id}/{act}")
def change(
    hub: HubOf, visitor: Editor, id: str, act: Literal["test", "enable", "disable", "replay"]
) -> Response:
    if act == "test":
        api.send_test(hub, id)
    elif act == "replay":
        api.replay(hub, visitor.form.get("delivery", ""), "force" in visitor.form)
    else:
        api.enable_or_disable(hub, id, act)
    return go(f"/webhooks/{id}")
