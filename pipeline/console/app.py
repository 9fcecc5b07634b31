"""Joins the pages into one router for the hub: signing in, the stream of changes, and the pages."""

from base64 import urlsafe_b64decode
from collections.abc import AsyncIterator, Iterator
from functools import partial
from mimetypes import guess_type
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from sqlalchemy import func, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jobs.folder import LOG, METRICS
from pipeline.console import datasets, jobs, loop, playground, releases
from pipeline.console import webhooks as webhook_pages
from pipeline.console.page import (
    ASSETS,
    HEADERS,
    LINK_SECONDS,
    SESSION_SECONDS,
    Console,
    ConsoleOf,
    Form,
    Page,
    Viewer,
    cookie_name,
    go,
    opened,
    page,
    sealed,
    viewer,
)
from pipeline.hub.database import deliveries, events, webhooks
from pipeline.hub.errors import NotFound, Unauthorized
from pipeline.hub.service import Hub, HubOf
from serving.weights.release_store import SERVED

NUM_WATCHED = 50
"""Only the newest jobs are looked at: an older one has almost always ended."""


def create_router(console: Console) -> APIRouter:
    async def bring(request: Request) -> None:
        request.state.console = console

    router = APIRouter(dependencies=[Depends(bring)])
    router.include_router(entrance)
    for pages in (loop, datasets, jobs, releases, playground, webhook_pages):
        router.include_router(pages.router, dependencies=[Depends(viewer)])
    return router


entrance = APIRouter(route_class=Page)


@entrance.get("/login")
async def show_login(
    request: Request, hub: HubOf, console: ConsoleOf, next: str = "/", once: str | None = None
) -> Response:
    """The form that asks for a token. `once` is a link of `pipeline open`, which needs none."""
    if once is None:
        return page(request, "login.html", next=next)
    token = opened(hub, once, "link", LINK_SECONDS)
    # The same bytes can be written as several texts.
    content = b"" if token is None else urlsafe_b64decode(once)
    if token is None or content in console.used_links:
        wrong = "This link was used already, or is older than a minute: run `pipeline open` again."
        return page(request, "login.html", status=403, next=next, wrong=wrong)
    console.used_links.add(content)
    return _signed_in(hub, token, next)


@entrance.post("/login")
async def login(request: Request, hub: HubOf, form: Form) -> Response:
    token, back = form.get("token", "").strip(), form.get("next", "/")
    try:
        identity = await run_in_threadpool(hub.identify, token.encode())
    except Unauthorized:
        wrong = "The hub does not know this token. `pipeline open` signs you in without one."
        return page(request, "login.html", status=401, next=back, wrong=wrong)
    identity.require_person("the console")
    return _signed_in(hub, token, back)


@entrance.post("/logout")
async def logout(hub: HubOf, _: Form) -> Response:
    answer = go("/login")
    answer.delete_cookie(cookie_name(hub), httponly=True, samesite="strict")
    return answer


def _signed_in(hub: Hub, token: str, back: str) -> Response:
    # A path with two slashes would be the address of another site.
    answer = go(back if back.startswith("/") and not back.startswith("//") else "/")
    answer.set_cookie(
        cookie_name(hub),
        sealed(hub.secret_key, "session", token),
        max_age=SESSION_SECONDS,
        httponly=True,
        samesite="strict",
        secure=hub.settings.url.startswith("https:"),
    )
    return answer


@entrance.get("/assets/{name}")
async def send_asset(name: str) -> Response:
    if name not in ASSETS:
        raise NotFound(f"The console has no asset {name}.")
    headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
    return Response(ASSETS[name], media_type=guess_type(name)[0], headers=headers)


@entrance.get("/events")
async def stream(
    request: Request, hub: HubOf, console: ConsoleOf, _: Viewer, seen: str = ""
) -> Response:
    """Tells the page when to ask for itself again. `seen` is what the page shows."""
    seen = request.headers.get("last-event-id", seen)

    async def told() -> AsyncIterator[str]:
        yield ": hello\n\n"  # so that the client learns that it is connected
        changes = console.watch.changes(
            partial(_looked_at, hub, console), seen, request.scope["is_stopping"]
        )
        async for digest in changes:
            yield f"id: {digest}\nevent: change\ndata: \n\n"

    return StreamingResponse(told(), media_type="text/event-stream", headers=HEADERS)


def _looked_at(hub: Hub, console: Console) -> Iterator[Any]:
    """What pages show, or what changes with it. Cheap, because it is asked for every second."""
    for job in hub.jobs_store.list(limit=NUM_WATCHED):
        yield job.id, job.state, job.attempt, job.cancel_requested, job.waits_for
        if not job.has_ended:
            for name in (METRICS, LOG):
                yield _stat(hub.jobs_dir / job.id / name)
    with hub.database.read() as connection:
        yield connection.scalar(select(func.max(events.c.seq)))
        is_pending = deliveries.c.status == "pending"
        waiting = select(func.count(), func.sum(deliveries.c.attempt)).where(is_pending)
        yield connection.execute(waiting).all()
        yield connection.execute(
            select(webhooks.c.id, webhooks.c.disabled, webhooks.c.suspended_at)
        ).all()
    for pipeline in console.settings.pipelines:
        folder = console.home.releases_dir / pipeline.name
        yield [_stat(each) for each in (folder, folder / SERVED)]
    yield [
        (name, report.get("release"), report.get("error"))
        for listed in hub.followers.values()
        for name, (_, report) in listed.items()
    ]


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns
