"""The pages of jobs: the list, and one job with its stages, curves, log and outcome."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Any, Literal

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jobs.folder import LOG, METRICS, read_log, tail_offset
from jobs.job import Job, JobState
from pipeline.console.page import HEADERS, Console, ConsoleOf, Editor, Page, go, page
from pipeline.doctor.facts import how_far, wrong_answers
from pipeline.errors import PipelineError
from pipeline.hub.routes.jobs import Found, asked_for
from pipeline.hub.service import Hub, HubOf
from pipeline.retrain.job import SNAPSHOT, DatasetSnapshot, Metric, read_metrics, read_record
from pipeline.runner.submit import submit_retraining
from serving.errors import ReleaseError
from serving.weights.release_store import load_release

NUM_LISTED = 50
NUM_LINES = 200
MAX_TAIL_BYTES = 64 * 1024
MAX_METRICS_BYTES = 4 * 1024 * 1024
"""Of a longer file, only the end is read."""
MAX_POINTS = 400
CURVES = {"Loss, nats per token": "step", "Learned, % of rows": "evaluation"}
"""Title → the metrics that the curve shows, of a job and of its parent."""
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""What a terminal takes as commands, such as colours and titles."""

router = APIRouter(route_class=Page)


@router.get("/jobs")
def list_jobs(
    request: Request,
    hub: HubOf,
    state: JobState | Literal[""] = "",
    pipeline: str = "",
    before: str | None = None,
) -> Response:
    found = hub.jobs_store.list(
        pipeline or None, state or None, limit=NUM_LISTED + 1, before=before
    )
    return page(request, "jobs.html", jobs=found[:NUM_LISTED], has_more=len(found) > NUM_LISTED)


@router.get("/jobs/{id}")
def show_job(request: Request, hub: HubOf, console: ConsoleOf, job: Found) -> Response:
    folder = hub.jobs_dir / job.id
    metrics = metrics_of(folder)
    facts: dict[str, Any] = {"job": job, "stages": stages_of(metrics), "log": _tail(folder, job)}
    facts |= {"wrong": wrong_answers(folder), "asked": asked_for(hub, job.spec)}
    both = (metrics, _before(hub, console, job))
    facts["curves"] = {title: [_points(each, of) for each in both] for title, of in CURVES.items()}
    return page(request, "job.html", **facts)


@router.get("/jobs/{id}/log")
def send_log(hub: HubOf, job: Found) -> Response:
    """The whole log, in pieces: it may be large."""

    def pieces() -> Iterator[str]:
        offset = 0
        while read := read_log(hub.jobs_dir / job.id, job.identity, offset):
            whole = read[: read.rfind(b"\n") + 1] or read
            offset += len(whole)
            yield plain(whole)

    return StreamingResponse(pieces(), media_type="text/plain", headers=HEADERS)


# Actions


@router.post("/jobs/{id}/cancel")
def cancel(hub: HubOf, _: Editor, job: Found) -> Response:
    return go(f"/jobs/{hub.jobs_store.cancel(job.id).id}")


@router.post("/jobs/{id}/retry")
def retry(hub: HubOf, editor: Editor, job: Found) -> Response:
    # A command may do anything as the user of the runner. A token for pushes must not start one.
    if job.spec.pipeline is None and not editor.identity.owns_hub:
        raise PipelineError(f"{job.id} is a command: only the hub's own token may run it again.")
    return go(f"/jobs/{hub.jobs_store.repeat(job.id).id}")


@router.post("/pipelines/{name}/retrain")
def retrain(hub: HubOf, console: ConsoleOf, editor: Editor, name: str) -> Response:
    """Retrains now, as `pipeline jobs run` does, with its options as the fields of the form."""
    form, pipeline = editor.form, console.settings.pipeline(name)
    if mode := form.get("mode"):
        train = pipeline.train.model_validate({**pipeline.train.model_dump(), "mode": mode})
        pipeline = pipeline.model_copy(update={"train": train})
    job = submit_retraining(
        hub.jobs_store,
        console.home,
        console.settings,
        hub_url=console.settings.hub_url,
        pipeline=pipeline,
        revision=form.get("revision") or None,
        force_reason=form.get("reason", "").strip() or None,
        skip_if="never" if mode else "nothing_changed",
    )
    return go(f"/jobs/{job.id}")


# What a job has written


def plain(text: bytes) -> str:
    """The text as it would look on a terminal, without colours. A progress bar writes each of its
    states over the last one, with \\r: only the last is left."""
    lines = _CODES.sub("", text.decode(errors="replace")).split("\n")
    return "\n".join(each.rstrip("\r").rpartition("\r")[2] for each in lines)


def _tail(folder: Path, job: Job) -> str:
    log = folder / LOG
    size = log.stat().st_size if log.exists() else 0
    offset = max(tail_offset(folder, job.identity, NUM_LINES), size - MAX_TAIL_BYTES)
    return plain(read_log(folder, job.identity, offset)[:MAX_TAIL_BYTES])


def metrics_of(folder: Path) -> tuple[Metric, ...]:
    """Of the job with this folder; empty if it has written none."""
    file = folder / METRICS
    return _metrics(file, file.stat().st_size) if file.exists() else ()


@lru_cache(maxsize=16)
def _metrics(file: Path, size: int) -> tuple[Metric, ...]:
    return read_metrics(file, max(0, size - MAX_METRICS_BYTES))[0]


def stages_of(metrics: Sequence[Metric]) -> list[dict[str, Any]]:
    """The stages so far. `seconds` is how long one took; None while it runs."""
    stages: list[dict[str, Any]] = []
    for metric in metrics:
        if not stages or stages[-1]["name"] != metric.stage or metric.event == "start":
            stages.append({"name": metric.stage, "began_at": metric.time, "note": None})
        note = how_far(metric) or stages[-1]["note"]
        stages[-1] |= {"note": note, "seconds": metric.seconds}
    return stages


def _before(hub: Hub, console: Console, job: Job) -> tuple[Metric, ...]:
    """The metrics of the job that made the release from which this job continues."""
    snapshot = read_record(hub.jobs_dir / job.id / SNAPSHOT, DatasetSnapshot)
    with suppress(ReleaseError):
        if snapshot and snapshot.parent:
            folder = console.home.releases_dir / str(job.spec.pipeline)
            release = load_release(folder / snapshot.parent)
            return metrics_of(hub.jobs_dir / str(release.lineage.job_id))
    return ()


def _points(metrics: Sequence[Metric], event: str) -> list[tuple[int, float]]:
    """The loss at each step, or the share of the rows that each evaluation found learned: at most
    MAX_POINTS of them, and the last one. A full training after a refused delta begins anew."""
    points = list[tuple[int, float]]()
    for each in metrics:
        if (each.stage, each.event) == ("train", "start"):
            points.clear()
        value = each.loss if event == "step" else each.rows and 100 * (each.right or 0) / each.rows
        if each.event == event and value is not None and isfinite(value):
            points.append((each.step or 0, value))
    return [*points[:: len(points) // MAX_POINTS + 1], *points[-1:]]
