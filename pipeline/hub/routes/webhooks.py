"""API routes with which `HfApi` of `huggingface_hub` manages webhooks."""

import contextlib
import difflib
from collections.abc import Collection, Iterator, Mapping
from secrets import token_hex
from typing import TypedDict

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jobs.errors import JobNotFound
from pipeline.hub.errors import BadRequest, Forbidden
from pipeline.hub.http_json import client_warning, read_json
from pipeline.hub.repositories.names import REPOSITORY_TYPES, RepositoryName
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.tokens.auth import Identity, identity_of
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.store import (
    CreateWebhook,
    HubWatchedItem,
    StoredWebhook,
    UpdateWebhook,
    create_webhook,
    delete_webhook,
    get_webhook,
    list_webhooks,
    update_webhook,
)
from receiver.webhooks import Domain, WebhookStatus

_BASE = "/api/settings/webhooks"


class WebhookJson(TypedDict, total=False):
    id: str
    url: str
    watched: list[dict[str, str]]
    domains: list[Domain]
    disabled: bool
    status: WebhookStatus
    job: Mapping[str, object]
    secret: str
    warnings: list[str]


def routes() -> list[Route]:
    return [
        Route(_BASE, list_all, methods=["GET"]),
        Route(_BASE, create, methods=["POST"]),
        Route(f"{_BASE}/{{id}}", show, methods=["GET"]),
        Route(f"{_BASE}/{{id}}", change, methods=["POST"]),
        Route(f"{_BASE}/{{id}}", remove, methods=["DELETE"]),
        Route(f"{_BASE}/{{id}}/enable", enable, methods=["POST"]),
        Route(f"{_BASE}/{{id}}/disable", disable, methods=["POST"]),
    ]


async def list_all(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> list[WebhookJson]:
        with hub.database.read() as connection:
            return [_described(hub, connection, one) for one in list_webhooks(connection)]

    return JSONResponse(await run_in_threadpool(read))


async def show(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> WebhookJson:
        with hub.database.read() as connection:
            webhook = get_webhook(connection, request.path_params["id"])
            return _described(hub, connection, webhook)

    return JSONResponse({"webhook": await run_in_threadpool(read)})


async def create(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, CreateWebhook)
    if body.url is None and body.jobSourceId is None:
        raise BadRequest("url: a webhook needs the URL that it calls, or a job in `jobSourceId`.")
    if body.secrets is not None and body.jobSourceId is None:
        raise BadRequest("secrets: only a webhook that starts a job has any: leave them out.")
    _check_secrets(identity_of(request), body)
    new = body.model_copy(update=_watched(hub, body))

    def act() -> WebhookJson:
        _check_job(hub, body)
        with hub.database.write() as connection:
            created = create_webhook(connection, new, hub.cipher)
            return _described(hub, connection, created)

    created = await run_in_threadpool(act)
    if body.secret:
        created["secret"] = body.secret
    return _changed(created)


async def change(request: Request) -> Response:
    """Changes a webhook. If the URL, the job or the secret changes, a suspended webhook is enabled
    again, and the pending deliveries are due at once."""
    hub = hub_of(request)
    body = await read_json(request, UpdateWebhook)
    _check_secrets(identity_of(request), body)
    new = body.model_copy(update=_watched(hub, body))

    def act() -> WebhookJson:
        _check_job(hub, body)
        with hub.database.write() as connection:
            id = request.path_params["id"]
            before = get_webhook(connection, id)
            after = update_webhook(connection, id, new, hub.cipher)
            if after.target_and_proof != before.target_and_proof:
                outbox.restart(connection, after)
            return _described(hub, connection, get_webhook(connection, id))

    changed = await run_in_threadpool(act)
    hub.log.wake()
    return _changed(changed)


async def enable(request: Request) -> Response:
    """Enables a webhook that is disabled or suspended. The pending deliveries of the webhook are
    sent at once, and earlier failures do not count any more."""
    changed = await _resume(request, disabled=False)
    hub_of(request).log.wake()
    return changed


async def disable(request: Request) -> Response:
    """Disables a webhook. Its pending deliveries wait until it is enabled. For events that happen
    in the meantime, it gets no deliveries."""
    return await _resume(request, disabled=True)


async def remove(request: Request) -> Response:
    hub = hub_of(request)

    def act() -> None:
        with hub.database.write() as connection:
            delete_webhook(connection, request.path_params["id"])

    await run_in_threadpool(act)
    return JSONResponse({})


def _changed(webhook: WebhookJson) -> Response:
    # Each answer has a topic of its own, because a client prints one warning for each topic.
    headers = client_warning(f"webhook {token_hex(8)}", webhook.get("warnings", ()))
    return JSONResponse({"webhook": webhook}, headers=headers)


async def _resume(request: Request, *, disabled: bool) -> Response:
    hub = hub_of(request)

    def act() -> WebhookJson:
        with hub.database.write() as connection:
            id = request.path_params["id"]
            outbox.restart(connection, get_webhook(connection, id), disabled=disabled)
            return _described(hub, connection, get_webhook(connection, id))

    return JSONResponse({"webhook": await run_in_threadpool(act)})


def _watched(hub: Hub, body: CreateWebhook | UpdateWebhook) -> dict[str, object]:
    """What the webhook watches. A name without an owner means a repository of the hub's owner, as
    in every other request."""
    return {"watched": tuple(item.with_owner(hub.settings.owner) for item in body.watched)}


def _check_job(hub: Hub, body: CreateWebhook | UpdateWebhook) -> None:
    """Raises BadRequest if the request names a job that a webhook cannot start."""
    if body.jobSourceId is None:
        return
    if body.url is not None:
        raise BadRequest("`url` and `jobSourceId` are both set: set only one of them.")
    if hub.launcher is None:
        raise BadRequest(
            "This hub was started without a job store, so a webhook cannot start jobs: give the "
            "webhook a `url`."
        )
    try:
        hub.launcher.describe(body.jobSourceId)
    except JobNotFound as error:
        raise BadRequest(str(error)) from None


def _check_secrets(identity: Identity, body: CreateWebhook | UpdateWebhook) -> None:
    """Raises Forbidden if the request has secrets and its token is not the hub's own.

    The secrets become environment variables of a job. Many variables make a program run other code
    (`BASH_ENV`, `LD_PRELOAD`, `PYTHONWARNINGS`, …), and others send its requests, with its tokens,
    to another server. No list of such names is complete. A job runs as the user who started the
    stack, so only this user may set its variables.
    """
    if body.secrets and not identity.owns_hub:
        raise Forbidden(
            "secrets: they become environment variables of a job, and so may change what the job "
            "runs. Only the hub's own token, which `pipeline env` prints, may set them."
        )


def _described(hub: Hub, connection: Connection, webhook: StoredWebhook) -> WebhookJson:
    """The webhook in the form that `huggingface_hub` parses, with `status` and `warnings` in
    addition. The secret is left out. Only the answer to the request that creates a webhook has it.
    """
    described: WebhookJson = {
        "id": webhook.id,
        "watched": [item.model_dump() for item in webhook.watched],
        "domains": list(webhook.domains),
        "disabled": webhook.disabled,
        "status": webhook.status,
    }
    if webhook.url is not None:
        described["url"] = webhook.url
    else:
        described["job"] = {"sourceId": webhook.job_id}
    present = [repository.name for repository in hub.repositories.all(connection)]
    if found := _warnings(webhook, present):
        described["warnings"] = found
    if webhook.job_id is not None and hub.launcher is not None:
        # If the job does not exist any more, the answer has only its id.
        with contextlib.suppress(JobNotFound):
            described["job"] = hub.launcher.describe(webhook.job_id)
    return described


def _warnings(webhook: StoredWebhook, present: Collection[RepositoryName]) -> list[str]:
    """A warning for each watched item that matches no repository now. This is not an error, because
    somebody may create the repository later. `present` are the names of all repositories."""
    return [reason for item in webhook.watched for reason in _in_vain(item, present)]


def _in_vain(item: HubWatchedItem, present: Collection[RepositoryName]) -> Iterator[str]:
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
