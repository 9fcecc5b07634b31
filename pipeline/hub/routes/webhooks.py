"""API routes for webhooks, which are those of `HfApi` of `huggingface_hub`, and for deliveries:
they list deliveries, replay one, or send a test event."""

import difflib
import time
from collections.abc import Collection, Iterator
from secrets import token_hex
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection
from starlette.responses import JSONResponse

from jobs.errors import JobNotFound
from pipeline.hub import outbox
from pipeline.hub.errors import BadRequest, NotSupported
from pipeline.hub.events import Event
from pipeline.hub.http_json import Json, client_warning, json_body
from pipeline.hub.outbox import DeliveryStatus
from pipeline.hub.repositories import REPOSITORY_TYPES, Repository, RepositoryName
from pipeline.hub.service import Hub, HubOf, person
from pipeline.hub.webhooks import (
    HubWatchedItem,
    StoredWebhook,
    WebhookRequest,
    change_webhook,
    create_webhook,
    delete_webhook,
    get_enabled_webhook,
    get_webhook,
    list_webhooks,
    update_webhook,
)
from receiver.payload import PING

router = APIRouter(prefix="/api/settings", dependencies=[Depends(person)])


@router.get("/webhooks")
def list_all(hub: HubOf) -> list[Json]:
    with hub.database.read() as connection:
        return [_described(hub, connection, one) for one in list_webhooks(connection)]


@router.get("/webhooks/{id}")
def show(hub: HubOf, id: str) -> Json:
    with hub.database.read() as connection:
        return {"webhook": _described(hub, connection, get_webhook(connection, id))}


def _checked(
    hub: HubOf, body: Annotated[WebhookRequest, json_body(WebhookRequest)]
) -> WebhookRequest:
    """The request. What it watches without an owner is the hub's owner's, as in every other
    request. Raises BadRequest if it names a job that a webhook cannot start, and NotSupported if it
    has secrets."""
    if body.secrets:
        raise NotSupported(
            "secrets of a webhook: not supported by this hub. A job gets the environment of the "
            "stack: set the variables there, and start the stack again."
        )
    if body.jobSourceId is not None:
        if body.url is not None:
            raise BadRequest("`url` and `jobSourceId` are both set: set only one of them.")
        try:
            hub.jobs_store.get(body.jobSourceId)
        except JobNotFound as error:
            raise BadRequest(str(error)) from None
    watched = tuple(item.with_owner(hub.settings.owner) for item in body.watched)
    return body.model_copy(update={"watched": watched})


Checked = Annotated[WebhookRequest, Depends(_checked)]


@router.post("/webhooks")
def create(hub: HubOf, body: Checked) -> JSONResponse:
    with hub.database.write() as connection:
        created = create_webhook(connection, body, hub.cipher)
        described = _described(hub, connection, created)
    return _changed(described | ({"secret": body.secret} if body.secret else {}))


@router.post("/webhooks/{id}")
def change(hub: HubOf, body: Checked, id: str) -> JSONResponse:
    """Changes a webhook. If the URL, the job or the secret changes, a suspended webhook is enabled
    again, and the pending deliveries are due at once."""
    with hub.database.write() as connection:
        before = get_webhook(connection, id)
        after = update_webhook(connection, id, body, hub.cipher)
        # If a person sets the same secret again, this counts as a change too, because the hub
        # encrypts it into other bytes each time.
        seen = ("url", "job_id", "encrypted_secret")
        if any(getattr(before, name) != getattr(after, name) for name in seen):
            change_webhook(connection, after, **outbox.NO_FAILURES)
        described = _described(hub, connection, get_webhook(connection, id))
    return _changed(described)


@router.delete("/webhooks/{id}")
def remove(hub: HubOf, id: str) -> Json:
    with hub.database.write() as connection:
        delete_webhook(connection, id)
    return {}


@router.get("/deliveries")
@router.get("/webhooks/{id}/deliveries")
def list_deliveries(
    hub: HubOf,
    id: str | None = None,
    status: DeliveryStatus | None = None,
    limit: Annotated[int, Query(ge=0, le=1000)] = 100,
) -> list[Json]:
    """The deliveries of one webhook, or of all, newest first."""
    with hub.database.read() as connection:
        if id is not None:
            get_webhook(connection, id)
        return outbox.list_deliveries(connection, id, status=status, limit=limit)


@router.get("/deliveries/{delivery_id}")
def show_delivery(hub: HubOf, delivery_id: str) -> Json:
    with hub.database.read() as connection:
        return {"delivery": outbox.get_delivery(connection, delivery_id)}


@router.post("/deliveries/{delivery_id}/replay")
def replay(hub: HubOf, delivery_id: str, force: bool = False) -> Json:
    """Sends a delivery again, to the webhook's present URL. With `force`, the delivery gets a new
    id, so that the receiver handles it again."""
    with hub.database.write() as connection:
        delivery = outbox.replay(connection, delivery_id, force=force)
    return {"delivery": delivery}


@router.post("/webhooks/{id}/test")
def send_test(hub: HubOf, id: str) -> Json:
    """Sends an event of the scope `ping`. A receiver answers it and does nothing else."""
    with hub.database.write() as connection:
        webhook = get_enabled_webhook(connection, id)
        first = webhook.watched[0]
        owner, _, name = first.name.partition("/")
        about = Repository(  # which is not stored, and need not exist
            id=token_hex(12),
            name=RepositoryName(
                type=first.type if first.type in ("dataset", "space") else "model",
                owner=owner,
                name=name or "ping",
            ),
            created_at=time.time(),
            folder=hub.repositories.incoming,
        )
        ping = Event(action="update", scope=PING)
        [sent] = hub.log.record(connection, about, ping, webhooks=[webhook])
        change_webhook(connection, webhook, retry_at=None)
        delivery = outbox.get_delivery(connection, sent)
    return {"delivery": delivery}


# After the test, because its path also matches that of a test.
@router.post("/webhooks/{id}/{act}")
def enable_or_disable(hub: HubOf, id: str, act: Literal["enable", "disable"]) -> Json:
    """Enables a webhook that is disabled or suspended: earlier failures do not count any more, and
    its pending deliveries are sent at once. Or disables it: its pending deliveries wait until it is
    enabled, and it gets no deliveries for events that happen in the meantime."""
    with hub.database.write() as connection:
        webhook = get_webhook(connection, id)
        change_webhook(connection, webhook, **outbox.NO_FAILURES, disabled=act == "disable")
        return {"webhook": _described(hub, connection, get_webhook(connection, id))}


def _changed(webhook: dict[str, Any]) -> JSONResponse:
    # Each answer has a topic of its own, because a client prints one warning for each topic.
    headers = client_warning(f"webhook {token_hex(8)}", webhook.get("warnings", ()))
    return JSONResponse({"webhook": webhook}, headers=headers)


def _described(hub: Hub, connection: Connection, webhook: StoredWebhook) -> dict[str, Any]:
    """The webhook in the form that `huggingface_hub` parses, with `status` and `warnings` in
    addition. The secret is left out. Only the answer to the request that creates a webhook has it.
    """
    described: dict[str, Any] = {
        "id": webhook.id,
        "watched": [item.model_dump() for item in webhook.watched],
        "domains": list(webhook.domains),
        "disabled": webhook.disabled,
        "status": webhook.status,
    }
    if webhook.job_id is None:
        described["url"] = webhook.url
    else:
        described["job"] = {"sourceId": webhook.job_id}
    present = [repository.name for repository in hub.repositories.all(connection)]
    # Not an error, because somebody may create the repository later.
    if warnings := [reason for item in webhook.watched for reason in _in_vain(item, present)]:
        described["warnings"] = warnings
    return described


def _in_vain(item: HubWatchedItem, present: list[RepositoryName]) -> Iterator[str]:
    if any(item.covers(name) for name in present):
        return
    if item.type in ("org", "user"):
        yield f"{item} has no repository here" + _close(item.name, {each.owner for each in present})
    elif item.type not in REPOSITORY_TYPES:
        yield f"{item} sends no event: this hub has no {item.type}s"
    else:
        known = {f"{each.type}:{each.id}" for each in present}
        yield f"there is no {item} here" + _close(str(item), known)


def _close(wanted: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(wanted, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
