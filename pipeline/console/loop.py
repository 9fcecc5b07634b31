"""The page `/`: for each pipeline the way from the last commit to the servers, and above it what is
wrong."""

import time
from contextlib import suppress
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from pipeline.console.jobs import metrics_of, stages_of
from pipeline.console.page import ConsoleOf, Page, page
from pipeline.doctor.checks import CHECKS, check_releases, faults
from pipeline.doctor.facts import Facts, advice_after_refusal, counts_text
from pipeline.hub.contents import list_commits, resolve_revision
from pipeline.hub.errors import RepositoryNotFound, RevisionNotFound
from pipeline.hub.service import Hub, HubOf
from pipeline.hub.webhooks import list_deliveries
from pipeline.settings import PipelineSettings
from serving.errors import ReleaseError
from serving.weights.release_store import load_release, readable_served, release_ids

QUICK_CHECKS = [check for check in CHECKS if check is not check_releases]
"""`check_releases` reads all weights."""
NUM_DELIVERIES = 20

router = APIRouter(route_class=Page)


@router.get("/")
def show_loop(request: Request, hub: HubOf, console: ConsoleOf) -> Response:
    facts = Facts(console.home, console.settings)
    return page(
        request,
        "loop.html",
        now=time.time(),
        wrong=faults(facts, QUICK_CHECKS),
        hub_url=console.settings.hub_url,
        loops=[_loop(hub, facts, each) for each in console.settings.pipelines],
    )


def _loop(hub: Hub, facts: Facts, pipeline: PipelineSettings) -> dict[str, Any]:
    jobs = facts.jobs[pipeline.name]
    # What runs is more interesting than what waits for it.
    job = next((each for each in jobs if each.state == "RUNNING"), next(iter(jobs), None))
    stages = [] if job is None else stages_of(metrics_of(hub.jobs_dir / job.id))
    folder, counts = facts.releases_dir(pipeline), ""
    if releases := release_ids(folder):
        with suppress(ReleaseError):
            counts = counts_text(load_release(folder / releases[-1]).evaluation)
    return {
        "pipeline": pipeline,
        "is_here": facts.settings.is_on_own_hub(pipeline),
        "commit": _newest_commit(hub, pipeline),
        "delivery": _last_delivery(hub, pipeline),
        "job": job,
        "num_waiting": sum(each.state == "SCHEDULING" for each in jobs),
        "stage": stages[-1] if stages else None,
        "release": next(reversed(releases), None),
        "counts": counts,
        "served": facts.served(pipeline),
        "pending": readable_served(folder).pending,
        "followers": facts.followers(pipeline),
        "paused_since": hub.jobs_store.paused().get(pipeline.name),
        "refused": advice_after_refusal(jobs),
    }


def _newest_commit(hub: Hub, pipeline: PipelineSettings) -> Any:
    """None if the dataset is elsewhere, or has no commit yet."""
    with suppress(RepositoryNotFound, RevisionNotFound):
        repository = hub.repositories.find(hub.name_of("dataset", pipeline.dataset))
        head = resolve_revision(repository, pipeline.ref)
        return list_commits(repository, head, limit=1)[0]
    return None


def _last_delivery(hub: Hub, pipeline: PipelineSettings) -> Any:
    """Of the dataset; None if none of the newest deliveries is of it."""
    wanted = f"dataset:{pipeline.dataset}".lower()
    with hub.database.read() as connection:
        found = list_deliveries(connection, limit=NUM_DELIVERIES)
    return next((each for each in found if str(each["repository"]).lower() == wanted), None)
