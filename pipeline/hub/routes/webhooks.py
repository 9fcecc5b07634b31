"""API routes with which `HfApi` of `huggingface_hub` manages webhooks."""

import contextlib
import difflib
from collections.abc import Collection, Iterator
from secrets import token_hex
from typing import Annotated, Literal

from fastapi import APIRouter, Depends
from sqlalchemy import Connection
from starlette.responses import JSONResponse

from jobs.errors import JobNotFound
from pipeline.hub import outbox
from pipeline.hub.errors import BadRequest, NotSupported
from pipeline.hub.http_json import Json, client_warning, json_body
from pipeline.hub.repositories import REPOSITORY_TYPES, RepositoryName
from pipeline.hub.routes.access import person
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import (
    HubWatchedItem,
    StoredWebhook,
    WebhookRequest,
    create_webhook,
    delete_webhook,
    get_webhook,
    list_webhooks,
    update_webhook,
)

router = APIRouter(prefix="/api/settings/webhooks", dependencies=[Depends(person)])


@router.get("")
def list_all(hub: HubOf) -> list[Json]:
    with hub.database.read() as connection:
        return [_described(hub, connection, one) for one in list_webhooks(connection)]


@router.get("/{id}")
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
            hub.launcher.describe(body.jobSourceId)
        except JobNotFound as error:
            raise BadRequest(str(error)) from None
    watched = tuple(item.with_owner(hub.settings.owner) for item in body.watched)
    return body.model_copy(update={"watched": watched})


Checked = Annotated[WebhookRequest, Depends(_checked)]


@router.post("")
def create(hub: HubOf, body: Checked) -> JSONResponse:
    with hub.database.write() as connection:
        created = create_webhook(connection, body, hub.cipher)
        described = _described(hub, connection, created)
    return _changed(described | ({"secret": body.secret} if body.secret else {}))


@router.post("/{id}")
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
            outbox.restart(connection, after)
        described = _described(hub, connection, get_webhook(connection, id))
    return _changed(described)


@router.post("/{id}/{act}")
def enable_or_disable(hub: HubOf, id: str, act: Literal["enable", "disable"]) -> Json:
    """Enables a webhook that is disabled or suspended: earlier failures do not count any more, and
    its pending deliveries are sent at once. Or disables it: its pending deliveries wait until it is
    enabled, and it gets no deliveries for events that happen in the meantime."""
    with hub.database.write() as connection:
        outbox.restart(connection, get_webhook(connection, id), disabled=act == "disable")
        return {"webhook": _described(hub, connection, get_webhook(connection, id))}


@router.delete("/{id}")
def remove(hub: HubOf, id: str) -> Json:
    with hub.database.write() as connection:
        delete_webhook(connection, id)
    return {}


def _changed(webhook: Json) -> JSONResponse:
    # Each answer has a topic of its own, because a client prints one warning for each topic.
    warnings = webhook.get("warnings", ())
    assert isinstance(warnings, (list, tuple))
    headers = client_warning(f"webhook {token_hex(8)}", warnings)
    return JSONResponse({"webhook": webhook}, headers=headers)


def _described(hub: Hub, connection: Connection, webhook: StoredWebhook) -> Json:
    """The webhook in the form that `huggingface_hub` parses, with `status` and `warnings` in
    addition. The secret is left out. Only the answer to the request that creates a webhook has it.
    """
    described: Json = {
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
        # If the job does not exist any more, the answer has only its id.
        with contextlib.suppress(JobNotFound):
            described["job"] = hub.launcher.describe(webhook.job_id)
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
