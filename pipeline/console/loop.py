"""The page `/`: for each pipeline the way from the last commit to the servers, and above it what is
wrong."""

from contextlib import suppress
from functools import partial
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.console.datasets import of_pipeline
from pipeline.console.jobs import metrics_of, stages_of
from pipeline.console.page import Console, ConsoleOf, Page, page
from pipeline.console.releases import way_back
from pipeline.doctor.checks import CHECKS, check_releases, faults
from pipeline.doctor.facts import Facts, advice_after_refusal
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import list_deliveries
from pipeline.settings import PipelineSettings
from serving.errors import ReleaseError
from serving.weights.release_store import load_release, release_ids, served_or_empty

QUICK_CHECKS = [check for check in CHECKS if check is not check_releases]
"""`check_releases` reads all weights."""
NUM_DELIVERIES = 20

router = APIRouter(route_class=Page)


@router.get("/")
async def show_loop(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    # What was made before the last look may lack the change of which this look has told the page.
    facts = await console.loops.get(partial(_facts, hub, console), since=console.digest.made_at)
    return page(request, "loop.html", **facts)


def _facts(hub: Hub, console: Console) -> dict[str, Any]:
    facts = Facts(console.home, console.settings)
    with hub.database.read() as connection:
        found = list_deliveries(connection, limit=NUM_DELIVERIES)
    loops = [_loop(hub, console, facts, each) for each in console.settings.pipelines]
    return {"wrong": faults(facts, QUICK_CHECKS), "loops": loops, "deliveries": found}


def _loop(hub: Hub, console: Console, facts: Facts, pipeline: PipelineSettings) -> dict[str, Any]:
    dataset = of_pipeline(hub, console, pipeline)
    jobs = facts.jobs[pipeline.name]
    # What runs is more interesting than what waits for it.
    job = next((each for each in jobs if each.state == "RUNNING"), next(iter(jobs), None))
    folder, release = facts.releases_dir(pipeline), None
    with suppress(IndexError, ReleaseError):
        release = load_release(folder / release_ids(folder)[-1])
    return {
        "pipeline": pipeline,
        "dataset": dataset,
        "commit": dataset and dataset.about(dataset.head),
        "jobs": jobs,
        "job": job,
        "stages": [] if job is None else stages_of(metrics_of(hub.jobs_dir / job.id)),
        "release": release,
        "served": facts.served(pipeline),
        "pending": served_or_empty(folder).pending,
        "back": way_back(dataset, folder),
        "followers": facts.followers(pipeline),
        "paused_since": hub.jobs_store.paused().get(pipeline.name),
        "refused": advice_after_refusal(jobs),
    }
