"""API routes for jobs and scheduled jobs, which are those of `HfApi` of `huggingface_hub`. A job of
the API is a job of the store: a plain command that a person submits.

The path names an owner, as on the Hugging Face Hub. Any name means the hub's owner.
"""

import asyncio
import contextlib
import json
import time
from codecs import getincrementaldecoder
from collections.abc import AsyncIterator
from io import IncrementalNewlineDecoder
from secrets import token_hex
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Row, delete, insert, select
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from jobs.errors import JobNotFound, SealBroken
from jobs.folder import read_log, tail_offset
from jobs.job import Job, JobState, seal, unseal
from jobs.spec import LOCAL, JobSpec, Resources
from pipeline.hub.database import scheduled_jobs as table
from pipeline.hub.errors import BadRequest, NotFound, NotSupported
from pipeline.hub.events import owner_id
from pipeline.hub.http_json import Json, client_warning, iso_time, json_body
from pipeline.hub.schedules import next_run
from pipeline.hub.service import Hub, HubOf, hubs_own, person

_PAGE = 200
_POLL_SECONDS = 0.25
_KEEP_ALIVE_SECONDS = 15.0
"""More than 5 s: a client that does not follow takes 5 s of silence for the end of the log."""
_OLD_SECONDS = 5.0
_LINE_CHARACTERS = 1 << 20
"""A longer line is sent in parts, because the hub keeps a line in memory until its end."""
_ASKED = ("dockerImage", "spaceId", "flavor")
"""The fields that the hub keeps in the settings of a job's spec, and does not interpret."""
_IGNORED = client_warning(
    "jobs", ["the flavor is ignored, and the image too unless [hub] jobs_launcher names an engine"]
)


class RunRequest(BaseModel):
    """What a client wants to run, as `_create_job_spec` of `huggingface_hub` writes it."""

    model_config = ConfigDict(frozen=True, extra="allow", coerce_numbers_to_str=True)

    command: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    secrets: dict[str, str] = {}
    labels: dict[str, str] = {}
    timeoutSeconds: float | None = Field(default=None, gt=0)
    dockerImage: str | None = None
    spaceId: str | None = None
    flavor: str | None = None

    def spec(self, key: bytes, launcher: str) -> JobSpec:
        """Raises BadRequest if there is no command, and NotSupported."""
        if self.model_extra:
            raise NotSupported(
                f"{', '.join(self.model_extra)} of a job: not supported by this hub, which runs "
                "the command on its own machine: leave this out."
            )
        command = (*self.command, *self.arguments)
        if not command:
            raise BadRequest("command: a job needs a command.")
        return JobSpec(
            command=command,
            env=self.environment,
            sealed_env=seal(self.secrets, key) if self.secrets else None,
            labels=self.labels,
            timeout_seconds=self.timeoutSeconds,
            settings={name: value for name in _ASKED if (value := getattr(self, name))},
            launcher=launcher,
            resources=Resources(image=None if launcher == LOCAL else self.dockerImage),
        )


class ScheduleRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    schedule: str
    jobSpec: RunRequest


router = APIRouter(prefix="/api", dependencies=[Depends(person)])
# A job runs any command as the user of the runner. A token that a person got for pushes must not.
_OWN = [Depends(hubs_own)]


def _found(hub: HubOf, id: str) -> Job:
    return hub.jobs_store.get(id)


Found = Annotated[Job, Depends(_found)]


@router.post("/jobs/{owner}", dependencies=_OWN)
def run(hub: HubOf, body: Annotated[RunRequest, json_body(RunRequest)]) -> JSONResponse:
    job = hub.jobs_store.submit(body.spec(hub.secret_key, hub.settings.jobs_launcher), by_hand=True)
    return JSONResponse(_described(hub, job), headers=_IGNORED)


@router.get("/jobs/{owner}")
def list_jobs(
    request: Request,
    hub: HubOf,
    stage: Annotated[list[str] | None, Query()] = None,
    label: Annotated[list[str], Query()] = [],  # noqa: B006
    before: str | None = None,
) -> JSONResponse:
    """The jobs, newest first. A page may have fewer jobs than the next one."""
    states = None if stage is None else [each for each in get_args(JobState) if each in stage]
    try:
        found = hub.jobs_store.list(state=states, limit=_PAGE + 1, before=before)
    except JobNotFound as error:
        raise BadRequest(f"before: {error}") from None
    page, more = found[:_PAGE], found[_PAGE:]
    wanted = {tuple(each.split("=", 1)) for each in label}
    jobs = [_described(hub, job) for job in page if wanted <= job.spec.labels.items()]
    link = request.url.include_query_params(before=page[-1].id) if more else None
    return JSONResponse(jobs, headers={"Link": f'<{link}>; rel="next"'} if link else {})


@router.get("/jobs/{owner}/{id}")
def show(hub: HubOf, job: Found) -> Json:
    return _described(hub, job)


@router.post("/jobs/{owner}/{id}/cancel")
def cancel(hub: HubOf, job: Found) -> Json:
    return _described(hub, hub.jobs_store.cancel(job.id))


@router.get("/jobs/{owner}/{id}/logs")
async def logs(
    request: Request, hub: HubOf, job: Found, tail: Annotated[int | None, Query(ge=0)] = None
) -> Response:
    events = _log_events(request, hub, job, tail)
    headers = {"Cache-Control": "no-store"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _log_events(request: Request, hub: Hub, job: Job, tail: int | None) -> AsyncIterator[str]:
    """The lines of the log as server-sent events, until the job has ended or the hub stops.

    The log has no times. A client that does not follow the log stops at the first line that is a
    second newer than the answer's header `Date`, which may itself be two seconds old. So what the
    log has now gets a time before that, and a later line the time at which it is seen.
    """
    folder, offset = hub.jobs_dir / job.id, 0

    def look() -> tuple[bool, bytes]:
        # The row first: if it says that the job has ended, the log is complete.
        has_ended = hub.jobs_store.get(job.id).has_ended
        return has_ended, read_log(folder, job.identity, offset)

    if tail is not None:
        offset = await run_in_threadpool(tail_offset, folder, job.identity, tail)
    # A progress bar ends its lines with \r.
    decoder = IncrementalNewlineDecoder(getincrementaldecoder("utf-8")("replace"), translate=True)
    rest, seen_at, sent_at = "", time.time() - _OLD_SECONDS, time.monotonic()
    while not request.scope["is_stopping"]():
        has_ended, read = await run_in_threadpool(look)
        offset += len(read)
        is_over = has_ended and not read
        *lines, rest = (rest + decoder.decode(read, final=is_over)).split("\n")
        if rest and (is_over or len(rest) > _LINE_CHARACTERS):
            lines, rest = [*lines, rest], ""
        events = ({"timestamp": iso_time(seen_at), "data": line} for line in lines)
        if text := "".join(f"data: {json.dumps(event)}\n\n" for event in events):
            yield text
            sent_at = time.monotonic()
        if is_over:
            return
        if not read:
            if time.monotonic() - sent_at > _KEEP_ALIVE_SECONDS:
                yield ": keep-alive\n\n"
                sent_at = time.monotonic()
            await asyncio.sleep(_POLL_SECONDS)
            seen_at = time.time()


SCHEDULED = "/scheduled-jobs/{owner}"


@router.post(SCHEDULED, dependencies=_OWN)
def schedule(hub: HubOf, body: Annotated[ScheduleRequest, json_body(ScheduleRequest)]) -> Response:
    now = time.time()
    values = {
        "id": token_hex(12),
        "spec": body.jobSpec.spec(hub.secret_key, hub.settings.jobs_launcher).model_dump(
            mode="json"
        ),
        "schedule": body.schedule,
        "created_at": now,
        "next_run_at": next_run(body.schedule, now),
    }
    with hub.database.write() as connection:
        made = connection.execute(insert(table).values(values).returning(table)).one()
    return JSONResponse(_described_schedule(hub, made), headers=_IGNORED)


@router.get(SCHEDULED)
def list_scheduled(hub: HubOf) -> list[Json]:
    """All of them: `huggingface_hub` filters by labels itself."""
    with hub.database.read() as connection:
        rows = connection.execute(select(table).order_by(table.c.created_at.desc())).all()
    return [_described_schedule(hub, row) for row in rows]


@router.delete(SCHEDULED + "/{id}")
def remove_scheduled(hub: HubOf, id: str) -> Json:
    """Jobs that it has started go on."""
    with hub.database.write() as connection:
        if connection.execute(delete(table).where(table.c.id == id)).rowcount == 0:
            raise NotFound(
                f"There is no scheduled job {id!r}: list them with `hf jobs scheduled ps -a`."
            )
    return {}


def _described(hub: Hub, job: Job) -> Json:
    """The job in the form that `huggingface_hub` parses."""
    started, until = job.started_at, job.ended_at or time.time()
    reason = None if job.outcome is None else job.outcome.reason
    return {
        "id": job.id,
        "createdAt": iso_time(job.created_at),
        "startedAt": None if started is None else iso_time(started),
        "finishedAt": None if job.ended_at is None else iso_time(job.ended_at),
        **asked_for(hub, job.spec),
        "status": {"stage": job.state, "message": job.waits_for or reason},
        "durations": {
            "schedulingSecs": None if started is None else int(started - job.created_at),
            "runningSecs": None if started is None else int(until - started),
            "totalSecs": int(until - job.created_at),
        },
        "owner": _owner(hub),
    }


def _described_schedule(hub: Hub, row: Row[Any]) -> Json:
    last = {"id": row.last_job_id, "at": iso_time(row.last_run_at)} if row.last_job_id else None
    return {
        "id": row.id,
        "createdAt": iso_time(row.created_at),
        "jobSpec": asked_for(hub, JobSpec.model_validate(row.spec)),
        "schedule": row.schedule,
        "suspend": False,
        "concurrency": False,
        "status": {"lastJob": last, "nextJobRunAt": iso_time(row.next_run_at)},
        "owner": _owner(hub),
    }


def _owner(hub: Hub) -> Json:
    name = hub.settings.owner
    return {"id": owner_id(name), "name": name, "type": "user"}


def asked_for(hub: Hub, spec: JobSpec) -> Json:
    """What was to run. Of the secrets, only the names."""
    secrets: dict[str, str] = {}
    with contextlib.suppress(SealBroken):  # the stack has another key now
        secrets = dict.fromkeys(unseal(spec.sealed_env, hub.secret_key), "***")
    return {
        **{name: spec.settings.get(name) for name in _ASKED},
        "command": list(spec.command),
        "arguments": [],
        "environment": spec.env,
        "secrets": secrets,
        "labels": spec.labels,
        "timeout": spec.timeout_seconds,
    }
