"""The pages of jobs: the list, and one job with its stages, curves, log and outcome."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from jobs.errors import SealBroken
from jobs.folder import LOG, METRICS, is_of_another_job, read_log, tail_offset
from jobs.job import Job, JobState, unseal
from pipeline.console.page import HEADERS, Console, ConsoleOf, Editor, Page, go, page
from pipeline.doctor.facts import how_far, subject, wrong_answers
from pipeline.errors import PipelineError
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
MAX_WRONG = 100
MAX_POINTS = 400
WIDTH, HEIGHT = 600, 160
"""Of a curve, in units of its picture."""
_CODES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
"""What a terminal takes as commands, such as colours and titles."""
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")

router = APIRouter(route_class=Page)


@router.get("/jobs")
def list_jobs(
    request: Request,
    hub: HubOf,
    console: ConsoleOf,
    state: JobState | Literal[""] = "",
    pipeline: str = "",
    before: str | None = None,
) -> Response:
    found = hub.jobs_store.list(
        pipeline or None, state or None, limit=NUM_LISTED + 1, before=before
    )
    return page(
        request,
        "jobs.html",
        jobs=[(job, subject(job)) for job in found[:NUM_LISTED]],
        has_more=len(found) > NUM_LISTED,
        states=get_args(JobState),
        pipelines=[each.name for each in console.settings.pipelines],
        chosen={"state": state, "pipeline": pipeline},
        before=before,
    )


@router.get("/jobs/{id}")
def show_job(request: Request, hub: HubOf, console: ConsoleOf, id: str) -> Response:
    job = hub.jobs_store.get(id)
    folder = hub.jobs_dir / job.id
    is_ours = not is_of_another_job(folder, job.identity)
    metrics = metrics_of(folder) if is_ours else ()
    parent, before = _parent(hub, console, job) if is_ours else (None, ())
    wrong = wrong_answers(folder) if is_ours else None
    try:
        secrets = list(unseal(job.spec.sealed_env, hub.secret_key))
    except SealBroken as error:
        secrets = [str(error)]
    return page(
        request,
        "job.html",
        job=job,
        subject=subject(job),
        stages=stages_of(metrics),
        curves=list(_curves(metrics, parent, before)),
        wrong=None if wrong is None else wrong.answers[:MAX_WRONG],
        num_wrong=0 if wrong is None else len(wrong.answers),
        host=None if job.handle is None else job.handle.rpartition("@")[2].split(" ")[0],
        secrets=secrets,
        log=_tail(folder, job),
        num_lines=NUM_LINES,
    )


@router.get("/jobs/{id}/log")
def send_log(hub: HubOf, id: str) -> Response:
    """The whole log, in pieces: it may be large."""
    job = hub.jobs_store.get(id)

    def pieces() -> Iterator[str]:
        offset = 0
        while read := read_log(hub.jobs_dir / job.id, job.identity, offset):
            whole = read[: read.rfind(b"\n") + 1] or read
            offset += len(whole)
            yield plain(whole)

    return StreamingResponse(pieces(), media_type="text/plain", headers=HEADERS)


# Actions


@router.post("/jobs/{id}/cancel")
def cancel(hub: HubOf, _: Editor, id: str) -> Response:
    return go(f"/jobs/{hub.jobs_store.cancel(id).id}")


@router.post("/jobs/{id}/retry")
def retry(hub: HubOf, editor: Editor, id: str) -> Response:
    job = hub.jobs_store.get(id)
    if not job.has_ended:
        raise PipelineError(f"{job.id} has not ended: wait for it, or cancel it.")
    # A command may do anything as the user of the runner. A token for pushes must not start one.
    if job.spec.pipeline is None and not editor.identity.owns_hub:
        raise PipelineError(f"{job.id} is a command: only the hub's own token may run it again.")
    return go(f"/jobs/{hub.jobs_store.repeat(job.id).id}")


@router.post("/pipelines/{name}/retrain")
def retrain(hub: HubOf, console: ConsoleOf, editor: Editor, name: str) -> Response:
    """Retrains now, as `pipeline jobs run` does, with its options as the fields of the form."""
    form, pipeline = editor.form, console.settings.pipeline(name)
    mode = form.get("mode") or None
    if mode is not None:
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
        skip_if="nothing_changed" if mode is None else "never",
    )
    return go(f"/jobs/{job.id}")


# What a job has written


def plain(text: bytes) -> str:
    """The text as it would look on a terminal, without colours. A progress bar writes each of its
    states over the last one, with \\r: only the last is left."""
    lines = _CODES.sub("", text.decode(errors="replace")).split("\n")
    return "\n".join(_UNSEEN.sub("", each.rstrip("\r").rpartition("\r")[2]) for each in lines)


def _tail(folder: Path, job: Job) -> str:
    try:
        size = (folder / LOG).stat().st_size
    except OSError:  # the job has not begun
        return ""
    offset = max(tail_offset(folder, job.identity, NUM_LINES), size - MAX_TAIL_BYTES)
    return plain(read_log(folder, job.identity, offset)[:MAX_TAIL_BYTES])


def metrics_of(folder: Path) -> tuple[Metric, ...]:
    try:
        return _metrics(folder / METRICS, (folder / METRICS).stat().st_size)
    except OSError:  # the job has not begun, or is no retraining
        return ()


@lru_cache(maxsize=16)
def _metrics(file: Path, size: int) -> tuple[Metric, ...]:
    return read_metrics(file, max(0, size - MAX_METRICS_BYTES))[0]


@dataclass
class StageOfJob:
    name: str
    began_at: float
    seconds: float | None = None
    """How long it took; None while it runs."""
    note: str | None = None


def stages_of(metrics: Sequence[Metric]) -> list[StageOfJob]:
    stages: list[StageOfJob] = []
    for metric in metrics:
        if not stages or stages[-1].name != metric.stage or metric.event == "start":
            stages.append(StageOfJob(metric.stage, metric.time))
        stages[-1].note = how_far(metric) or stages[-1].note
        stages[-1].seconds = metric.seconds
    return stages


def _parent(hub: Hub, console: Console, job: Job) -> tuple[str | None, tuple[Metric, ...]]:
    """The release from which the job continues, and the metrics of the job that made it."""
    snapshot = read_record(hub.jobs_dir / job.id / SNAPSHOT, DatasetSnapshot)
    if snapshot is None or snapshot.parent is None or job.spec.pipeline is None:
        return None, ()
    folder = console.home.releases_dir / job.spec.pipeline / snapshot.parent
    try:
        made_by = load_release(folder).lineage.job_id
    except ReleaseError:
        made_by = None
    return snapshot.parent, metrics_of(hub.jobs_dir / made_by) if made_by else ()


# Curves


@dataclass(frozen=True, kw_only=True)
class Curve:
    title: str
    unit: str
    steps: int
    top: float
    """The largest value; the smallest is drawn as 0."""
    lines: list[tuple[str, str]]
    """`parent` or `own`, and the points as an SVG polyline takes them."""
    summary: str
    """The curve in words."""


def _curves(
    metrics: Sequence[Metric], parent: str | None, before: Sequence[Metric]
) -> Iterator[Curve]:
    yield from _curve(
        "Loss",
        "nats per token",
        parent,
        [_points(each, "step", lambda metric: metric.loss) for each in (before, metrics)],
    )
    yield from _curve(
        "Learned",
        "% of the checked rows",
        parent,
        [_points(each, "evaluation", _percent) for each in (before, metrics)],
    )


def _points(
    metrics: Sequence[Metric], event: str, value: Callable[[Metric], float | None]
) -> list[tuple[int, float]]:
    found = [(each.step or 0, value(each)) for each in metrics if each.event == event]
    return [(step, number) for step, number in found if number is not None and isfinite(number)]


def _percent(metric: Metric) -> float | None:
    return 100 * (metric.right or 0) / metric.rows if metric.rows else None


def _curve(
    title: str, unit: str, parent: str | None, series: Sequence[Sequence[tuple[int, float]]]
) -> Iterator[Curve]:
    """The curve of the parent's job and this one; nothing if neither has a point."""
    drawn = [
        (kind, name, points)
        for kind, name, points in zip(
            ("parent", "own"), (f"its parent {parent}", "this job"), series, strict=True
        )
        if points
    ]
    if not drawn:
        return
    steps = max(step for *_, points in drawn for step, _ in points) or 1
    top = max(value for *_, points in drawn for _, value in points) or 1.0
    yield Curve(
        title=title,
        unit=unit,
        steps=steps,
        top=top,
        lines=[
            (
                kind,
                " ".join(
                    f"{step / steps * WIDTH:.1f},{HEIGHT - value / top * HEIGHT:.1f}"
                    for step, value in [*points[:: len(points) // MAX_POINTS + 1], points[-1]]
                ),
            )
            for kind, _, points in drawn
        ],
        summary="; ".join(
            f"{name}: {points[0][1]:.3g} → {points[-1][1]:.3g} at step {points[-1][0]:,}"
            for _, name, points in reversed(drawn)
        ),
    )
