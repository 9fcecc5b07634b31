"""API routes for webhooks, which are those of `HfApi` of `huggingface_hub`, and for deliveries:
they list deliveries, replay one, or send a test event. Checks what clients send about webhooks."""

import time
from collections.abc import Iterator
from secrets import token_hex
from typing import Annotated, Any, Literal, get_args

from fastapi import APIRouter, Depends, Query
from pydantic import AfterValidator, AnyHttpUrl, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection, delete, insert
from starlette.responses import JSONResponse

from jobs.errors import JobNotFound
from jobs.job import seal
from pipeline.hub import webhooks
from pipeline.hub.database import webhooks as table
from pipeline.hub.errors import BadRequest, Forbidden, NotSupported
from pipeline.hub.events import Event
from pipeline.hub.http_json import Json, client_warning, json_body
from pipeline.hub.repositories import REPOSITORY_TYPES, Repository, RepositoryName
from pipeline.hub.service import Hub, HubOf, Who, person
from pipeline.hub.webhooks import (
    NO_FAILURES,
    SECRET,
    DeliveryStatus,
    HubWatchedItem,
    StoredWebhook,
    change_webhook,
    get_enabled_webhook,
    get_webhook,
    list_webhooks,
)
from receiver.payload import PING
from receiver.verify import check_signing_secret
from receiver.webhooks import Domain

# Visible ASCII, because the secret is sent in a header, where other characters may be changed.
Secret = Annotated[
    str,
    StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=512),
    AfterValidator(check_signing_secret),
]


class WebhookRequest(BaseModel):
    """A request that creates or changes a webhook. A field that is left out changes nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: AnyHttpUrl | None = None
    """Each attempt checks whether it may be called, because a name can get another address."""
    jobSourceId: str | None = None
    """The id of the job of which the webhook starts copies, instead of calling a URL."""
    watched: tuple[HubWatchedItem, ...] = ()
    """Empty changes nothing, because `huggingface_hub` sends an empty list for no change."""
    domains: Annotated[tuple[Domain, ...], Field(min_length=1)] | None = None
    secret: Secret | Literal[""] | None = None
    """The secret that the receiver checks. Empty removes it."""
    secrets: object = None
    """The Hugging Face Hub gives them to the copies of the job; this hub refuses them."""


def create_webhook(connection: Connection, request: WebhookRequest, key: bytes) -> StoredWebhook:
    """Raises BadRequest if a field is missing."""
    if not request.watched:
        raise BadRequest("watched: a webhook must watch something.")
    if request.url is None and request.jobSourceId is None:
        raise BadRequest("url: a webhook needs the URL that it calls, or a job in `jobSourceId`.")
    id = token_hex(12)
    empty = {"watched": [], "domains": list(get_args(Domain)), "disabled": False}
    connection.execute(insert(table).values(id=id, created_at=time.time(), **empty))
    return update_webhook(connection, id, request, key)


def update_webhook(
    connection: Connection, id: str, request: WebhookRequest, key: bytes
) -> StoredWebhook:
    """Changes the fields that the request names. If the URL, the job or the secret changes, a
    suspended webhook is enabled again, and the pending deliveries are due at once. Raises
    NotFound."""
    webhook = get_webhook(connection, id)
    changes: dict[str, object] = {}
    if request.url is not None:
        changes |= {"url": str(request.url), "job_id": None}
    elif request.jobSourceId is not None:
        changes |= {"url": None, "job_id": request.jobSourceId}
    if request.watched:
        changes["watched"] = [item.model_dump() for item in request.watched]
    if request.domains is not None:
        changes["domains"] = list(request.domains)
    if request.secret is not None:
        # If a person sets the same secret again, this counts as a change too, because it is
        # encrypted into another text each time.
        sealed = seal({SECRET: request.secret}, key) if request.secret else None
        changes["encrypted_secret"] = sealed
    seen = ("url", "job_id", "encrypted_secret")
    if any(name in changes and changes[name] != getattr(webhook, name) for name in seen):
        changes |= NO_FAILURES
    return change_webhook(connection, webhook, **changes) if changes else webhook


router = APIRouter(prefix="/api/settings", dependencies=[Depends(person)])


@router.get("/webhooks")
def list_all(hub: HubOf) -> list[Json]:
    with hub.database.read() as connection:
        present = list_webhooks(connection)
    return [_described(hub, each) for each in present]


@router.get("/webhooks/{id}")
def show(hub: HubOf, id: str) -> Json:
    with hub.database.read() as connection:
        webhook = get_webhook(connection, id)
    return {"webhook": _described(hub, webhook)}


def checked(
    hub: HubOf, identity: Who, body: Annotated[WebhookRequest, json_body(WebhookRequest)]
) -> WebhookRequest:
    """The request. What it watches without an owner is the hub's owner's, as in every other
    request. Raises BadRequest if a webhook cannot start the job that it names, Forbidden if the
    client may not start it, and NotSupported if it has secrets."""
    if body.secrets:
        raise NotSupported(
            "secrets of a webhook: not supported by this hub. A job gets the environment of the "
            "stack: set the variables there, and start the stack again."
        )
    if body.jobSourceId is not None:
        if body.url is not None:
            raise BadRequest("`url` and `jobSourceId` are both set: set only one of them.")
        try:
            source = hub.jobs_store.get(body.jobSourceId)
        except JobNotFound as error:
            raise BadRequest(str(error)) from None
        if source.spec.pipeline is None and not identity.owns_hub:
            raise Forbidden(f"To run the command of {source.id} needs the hub's own token.")
    watched = tuple(item.with_owner(hub.settings.owner) for item in body.watched)
    return body.model_copy(update={"watched": watched})


Checked = Annotated[WebhookRequest, Depends(checked)]


@router.post("/webhooks")
def create(hub: HubOf, body: Checked) -> JSONResponse:
    with hub.database.write() as connection:
        created = create_webhook(connection, body, hub.secret_key)
    return _changed(_described(hub, created) | ({"secret": body.secret} if body.secret else {}))


@router.post("/webhooks/{id}")
def change(hub: HubOf, body: Checked, id: str) -> JSONResponse:
    with hub.database.write() as connection:
        changed = update_webhook(connection, id, body, hub.secret_key)
    return _changed(_described(hub, changed))


@router.delete("/webhooks/{id}")
def remove(hub: HubOf, id: str) -> Json:
    with hub.database.write() as connection:
        get_webhook(connection, id)
        connection.execute(delete(table).where(table.c.id == id))
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
        return webhooks.list_deliveries(connection, id, status=status, limit=limit)


@router.get("/deliveries/{delivery_id}")
def show_delivery(hub: HubOf, delivery_id: str) -> Json:
    with hub.database.read() as connection:
        return {"delivery": webhooks.get_delivery(connection, delivery_id)}


@router.post("/deliveries/{delivery_id}/replay")
def replay(hub: HubOf, delivery_id: str, force: bool = False) -> Json:
    """Sends a delivery again, to the webhook's present URL. With `force`, the delivery gets a new
    id, so that the receiver handles it again."""
    with hub.database.write() as connection:
        delivery = webhooks.replay(connection, delivery_id, force=force)
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
        delivery = webhooks.get_delivery(connection, sent)
    return {"delivery": delivery}


# After the test, because its path also matches that of a test.
@router.post("/webhooks/{id}/{act}")
def enable_or_disable(hub: HubOf, id: str, act: Literal["enable", "disable"]) -> Json:
    """Enables a webhook that is disabled or suspended: earlier failures do not count any more, and
    its pending deliveries are sent at once. Or disables it: its pending deliveries wait until it is
    enabled, and it gets no deliveries for events that happen in the meantime."""
    with hub.database.write() as connection:
        webhook = get_webhook(connection, id)
        disabled = act == "disable"
        changed = change_webhook(connection, webhook, **NO_FAILURES, disabled=disabled)
    return {"webhook": _described(hub, changed)}


def _changed(webhook: dict[str, Any]) -> JSONResponse:
    # Each answer has a topic of its own, because a client prints one warning for each topic.
    headers = client_warning(f"webhook {token_hex(8)}", webhook.get("warnings", ()))
    return JSONResponse({"webhook": webhook}, headers=headers)


def _described(hub: Hub, webhook: StoredWebhook) -> dict[str, Any]:
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
    present = [repository.name for repository in hub.repositories.all()]
    # Not an error, because somebody may create the repository later.
    if warnings := [reason for item in webhook.watched for reason in _in_vain(item, present)]:
        described["warnings"] = warnings
    return described


def _in_vain(item: HubWatchedItem, present: list[RepositoryName]) -> Iterator[str]:
    if any(item.covers(name) for name in present):
        return
    if item.type in ("org", "user"):
        yield f"{item} has no repository here"
    elif item.type not in REPOSITORY_TYPES:
        yield f"{item} sends no event: this hub has no {item.type}s"
    else:
        yield f"there is no {item} here"
