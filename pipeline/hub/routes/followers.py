"""API routes for the servers that follow a model repository (`serving/follow.py`): each reports
which release it serves, and asks for a turn before it swaps. Who may read the repository may do
both."""

import time
from typing import Annotated

from fastapi import APIRouter
from pydantic import BaseModel, Field

from pipeline.hub.http_json import Json, json_body
from pipeline.hub.service import API, HubOf, Readable

FORGET_SECONDS = 24 * 3600
"""A server that has not reported for so long is not listed any more."""
MAX_LISTED = 1000
"""Of one repository, so that no token can fill the memory."""
TURN_SECONDS = 60
"""A turn ends with the next report of its server. A server that swaps asks for its turn again and
again; if it does not, its turn ends after this time."""
WAIT_SECONDS = 1.0
"""A server that has to wait for its turn asks again after this time."""

router = APIRouter(prefix=f"{API}/followers")

Text = Annotated[str, Field(max_length=2000)]


class Report(BaseModel):
    name: str = Field(min_length=1, max_length=200)
    url: Text | None = None
    release: Text | None = None
    """The id of the served release; None if the server serves none."""
    error: Text | None = None
    """Why it does not serve what the repository has."""


Told = Annotated[Report, json_body(Report)]


@router.get("")
async def list_followers(hub: HubOf, repository: Readable) -> list[Json]:
    """The newest report of each follower, with its age."""
    now = time.monotonic()
    return [
        {**report, "age_seconds": round(now - at, 1)}
        for at, report in hub.followers.get(repository.id, {}).values()
        if now - at < FORGET_SECONDS
    ]


@router.post("")
async def report(hub: HubOf, repository: Readable, report: Told) -> Json:
    hub.turns.get(repository.id, {}).pop(report.name, None)
    listed = hub.followers.setdefault(repository.id, {})
    listed.pop(report.name, None)  # so that the one that reported longest ago is the first
    listed[report.name] = (time.monotonic(), report.model_dump())
    if len(listed) > MAX_LISTED:
        del listed[next(iter(listed))]
    return {}


@router.post("/turn")
async def take_turn(hub: HubOf, repository: Readable, asking: Told) -> Json:
    """Answers 0 if the server may swap now, or else after how many seconds to ask again."""
    now, turns = time.monotonic(), hub.turns.setdefault(repository.id, {})
    others = [ends_at for name, ends_at in turns.items() if name != asking.name and ends_at > now]
    if len(others) >= hub.settings.max_unavailable:
        return {"wait_seconds": WAIT_SECONDS}
    turns[asking.name] = now + TURN_SECONDS
    return {"wait_seconds": 0}
