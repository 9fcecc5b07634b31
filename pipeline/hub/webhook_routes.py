"""API routes with which `HfApi` of `huggingface_hub` manages webhooks."""

import contextlib

from sqlalchemy import Connection
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from jobs.errors import JobNotFound
from pipeline.hub import suspension, watches, webhook_store
from pipeline.hub.errors import BadRequest
from pipeline.hub.http_json import read_json
from pipeline.hub.service import Hub, hub_of
from pipeline.hub.states import WebhookEvent
from pipeline.hub.webhook_store import CreateWebhook, StoredWebhook, UpdateWebhook, WebhookJson

_BASE = "/api/settings/webhooks"


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
            return [
                _described(hub, connection, one) for one in webhook_store.list_webhooks(connection)
            ]

    return JSONResponse(await run_in_threadpool(read))


async def show(request: Request) -> Response:
    hub = hub_of(request)

    def read() -> WebhookJson:
        with hub.database.read() as connection:
            webhook = webhook_store.get_webhook(connection, request.path_params["id"])
            return _described(hub, connection, webhook)

    return JSONResponse({"webhook": await run_in_threadpool(read)})


async def create(request: Request) -> Response:
    hub = hub_of(request)
    body = await read_json(request, CreateWebhook)
    if body.url is None and body.jobSourceId is None:
        raise BadRequest("url: a webhook needs the URL that it calls, or a job in `jobSourceId`.")
    if body.secrets is not None and body.jobSourceId is None:
        raise BadRequest("secrets: only a webhook that starts a job has them; leave them out.")

    def act() -> WebhookJson:
        _check_job(hub, body)
        with hub.database.write() as connection:
            created = webhook_store.create_webhook(connection, body, hub.cipher)
            return _described(hub, connection, created)

    created = await run_in_threadpool(act)
    if body.secret:
        created["secret"] = body.secret
    return JSONResponse({"webhook": created})


async def change(request: Request) -> Response:
    """Changes a webhook. If it gets another URL, job or secret, a suspension ends and its pending
    deliveries are sent at once."""
    hub = hub_of(request)
    body = await read_json(request, UpdateWebhook)

    def act() -> WebhookJson:
        _check_job(hub, body)
        with hub.database.write() as connection:
            id = request.path_params["id"]
            before = webhook_store.get_webhook(connection, id)
            after = webhook_store.update_webhook(connection, id, body, hub.cipher)
            if after.target_and_proof != before.target_and_proof:
                suspension.resume(connection, after, "changed")
            return _described(hub, connection, webhook_store.get_webhook(connection, id))

    changed = await run_in_threadpool(act)
    hub.log.wake()
    return JSONResponse({"webhook": changed})


async def enable(request: Request) -> Response:
    """Enables a disabled webhook, and ends a suspension. Its pending deliveries are sent at once,
    and earlier failures do not count any more."""
    changed = await _resume(request, "enabled")
    hub_of(request).log.wake()
    return changed


async def disable(request: Request) -> Response:
    """Disables a webhook. Its pending deliveries wait until it is enabled. Of events that happen
    meanwhile, it gets no delivery."""
    return await _resume(request, "disabled")


async def remove(request: Request) -> Response:
    hub = hub_of(request)

    def act() -> None:
        with hub.database.write() as connection:
            webhook_store.delete_webhook(connection, request.path_params["id"])

    await run_in_threadpool(act)
    return JSONResponse({})


async def _resume(request: Request, event: WebhookEvent) -> Response:
    hub = hub_of(request)

    def act() -> WebhookJson:
        with hub.database.write() as connection:
            id = request.path_params["id"]
            suspension.resume(connection, webhook_store.get_webhook(connection, id), event)
            return _described(hub, connection, webhook_store.get_webhook(connection, id))

    return JSONResponse({"webhook": await run_in_threadpool(act)})


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


def _described(hub: Hub, connection: Connection, webhook: StoredWebhook) -> WebhookJson:
    described = webhook_store.as_json(webhook)
    present = [repository.name for repository in hub.repositories.all(connection)]
    if found := watches.warnings(webhook, present):
        described["warnings"] = found
    if webhook.job_id is not None and hub.launcher is not None:
        # If the job does not exist any more, the answer has only its id.
        with contextlib.suppress(JobNotFound):
            described["job"] = hub.launcher.describe(webhook.job_id)
    return described
