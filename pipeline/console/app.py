"""Joins the pages into one router for the hub, tells open pages of changes, and sends files."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, Literal
from urllib.parse import unquote

from fastapi import APIRouter, Depends
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jobs.folder import LOG, METRICS
from pipeline.console import datasets, jobs, loop, playground, releases, webhooks
from pipeline.console.page import HEADERS, Console, ConsoleOf, Page, entrance, viewer
from pipeline.console.shared import LOOK_SECONDS
from pipeline.hub.database import deliveries, events
from pipeline.hub.routes.contents import UntilSent, resolve
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import list_webhooks
from serving.weights.release_store import release_ids, served_or_empty

NUM_WATCHED = 50
"""Only the newest jobs are looked at: an older one has almost always ended."""
PAGES_A_SECOND = 2
"""About how many pages are told of changes per second: each then asks for itself again. If more
pages are open, each is told more rarely."""


def create_router(console: Console) -> APIRouter:
    async def bring(request: Request) -> None:
        request.state.console = console

    router = APIRouter(dependencies=[Depends(bring)])
    router.include_router(entrance)
    pages = (loop, datasets, jobs, releases, playground, webhooks)
    for each in (common, *(module.router for module in pages)):
        router.include_router(each, dependencies=[Depends(viewer)])
    return router


common = APIRouter(route_class=Page)


@common.get("/files/{type}/{owner}/{name}/{revision}/{path:path}")
async def send_file(
    request: Request, hub: HubOf, sent: UntilSent, type: Literal["dataset", "model"]
) -> Response:
    """A file of a commit of a dataset, or of a release."""
    path = request.path_params
    name = hub.name_of(type, f"{path['owner']}/{path['name']}")
    repository = await run_in_threadpool(hub.repositories.find, name)
    return await resolve(request, hub, repository, sent, path["revision"], unquote(path["path"]))


@common.get("/events")
async def stream(request: Request, hub: HubOf, console: ConsoleOf, seen: str = "") -> Response:
    """Tells the page when to ask for itself again, until the browser or the hub goes. `seen` is the
    digest of what the page shows."""

    async def told() -> AsyncIterator[str]:
        last = request.headers.get("last-event-id", seen)
        console.streams.add(request)
        try:
            while not request.scope["is_stopping"]():
                if last != (digest := await console.digest.get(partial(_digest, hub, console))):
                    yield f"id: {digest}\nevent: change\ndata: \n\n"
                last = digest
                await asyncio.sleep(max(LOOK_SECONDS, len(console.streams) / PAGES_A_SECOND))
        finally:
            console.streams.discard(request)

    return StreamingResponse(told(), media_type="text/event-stream", headers=HEADERS)


def _digest(hub: Hub, console: Console) -> str:
    return hashlib.sha256(repr(list(_looked_at(hub, console))).encode()).hexdigest()[:16]


def _looked_at(hub: Hub, console: Console) -> Iterator[Any]:
    """What pages show, or what changes with it. Cheap, because it is asked for every second."""
    for job in hub.jobs_store.list(limit=NUM_WATCHED):
        yield job.id, job.state, job.attempt, job.cancel_requested, job.waits_for
        if not job.has_ended:  # the log and the metrics grow
            folder = hub.jobs_dir / job.id
            yield [each.stat().st_size for each in folder.glob("*") if each.name in (LOG, METRICS)]
    with hub.database.read() as connection:
        counts = select(func.count(), func.sum(deliveries.c.attempt))
        yield connection.execute(counts.where(deliveries.c.status == "pending")).all()
        yield connection.scalar(select(func.max(events.c.seq)))
        yield list_webhooks(connection)
    for pipeline in console.settings.pipelines:
        folder = console.home.releases_dir / pipeline.name
        yield release_ids(folder), served_or_empty(folder)
    yield [report for listed in hub.followers.values() for _, report in list(listed.values())]
