"""Joins the pages into one router for the hub, and tells open pages of changes."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any

from fastapi import APIRouter, Depends
from sqlalchemy import func, select
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jobs.folder import LOG, METRICS
from pipeline.console import datasets, jobs, loop, playground, releases, webhooks
from pipeline.console.page import HEADERS, Console, ConsoleOf, Page, Viewer, entrance, viewer
from pipeline.hub.database import deliveries, events
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import list_webhooks
from serving.weights.release_store import readable_served, release_ids

_PAUSE_SECONDS = 1.0
NUM_WATCHED = 50
"""Only the newest jobs are looked at: an older one has almost always ended."""


def create_router(console: Console) -> APIRouter:
    async def bring(request: Request) -> None:
        request.state.console = console

    router = APIRouter(dependencies=[Depends(bring)])
    router.include_router(entrance)
    router.include_router(changes)
    for pages in (loop, datasets, jobs, releases, playground, webhooks):
        router.include_router(pages.router, dependencies=[Depends(viewer)])
    return router


changes = APIRouter(route_class=Page)


@changes.get("/events")
async def stream(
    request: Request, hub: HubOf, console: ConsoleOf, _: Viewer, seen: str = ""
) -> Response:
    """Tells the page when to ask for itself again, until the browser or the hub goes. `seen` is the
    digest of what the page shows."""

    async def told() -> AsyncIterator[str]:
        last = request.headers.get("last-event-id", seen)
        while not request.scope["is_stopping"]():
            if last != (digest := await console.digest.get(partial(_digest, hub, console))):
                yield f"id: {digest}\nevent: change\ndata: \n\n"
            last = digest
            await asyncio.sleep(_PAUSE_SECONDS)

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
        yield release_ids(folder), readable_served(folder)
    yield [report for listed in hub.followers.values() for _, report in list(listed.values())]
