"""The calls of agents elsewhere (`jobs/attempt_on_hub.py`): the hub makes them on the job store.

These routes check the ticket or the token by themselves: when another attempt has the job, the
agent must get 409, which tells it to end, and not 401.
"""

import asyncio
from contextlib import suppress
from typing import Annotated

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request

from jobs.attempt import Orders, beat, lay_out, record_result
from jobs.attempt_on_hub import GROWING, PIECE_BYTES, Finish, Finished, Started, is_record
from jobs.errors import LeaseLost
from jobs.folder import OUTCOME, write_by_rename
from jobs.job import Job, attempt_token, is_start_ticket, job_of_token, running_job, unseal
from pipeline.hub.errors import BadRequest, Conflict, Unauthorized
from pipeline.hub.http_json import chunks, json_body
from pipeline.hub.releases import branch_of, take_release
from pipeline.hub.service import HubOf, sent_token

_MAX_FINISH_BYTES = 4 * PIECE_BYTES
_MAX_OFFSET = 2**40

router = APIRouter(prefix="/api/jobs/{job_id}/attempts/{attempt:int}")


class Start(BaseModel):
    model_config = ConfigDict(extra="forbid")

    handle: str


def attempt_of(job_id: str, attempt: int, hub: HubOf) -> Job:
    """The job, if this attempt has it now. Raises Conflict otherwise."""
    job = running_job(hub.jobs_store, job_id, attempt)
    if job is None or job.owner is None:
        raise Conflict(f"Job {job_id} has no attempt {attempt} now: another one has it, or none.")
    return job


def begun(request: Request, hub: HubOf, job: Annotated[Job, Depends(attempt_of)]) -> Job:
    """Also raises Unauthorized without the attempt's token."""
    found = job_of_token(_sent(request), hub.jobs_store, hub.secret_key)
    if found is None or found.id != job.id:
        raise Unauthorized(f"This is not the token of this attempt of job {job.id}.")
    return job


Begun = Annotated[Job, Depends(begun)]


@router.post("/start")
def start(
    request: Request,
    hub: HubOf,
    job: Annotated[Job, Depends(attempt_of)],
    body: Annotated[Start, json_body(Start)],
) -> Started:
    if not is_start_ticket(_sent(request), job, hub.secret_key):
        raise Unauthorized(f"This is not the ticket of this attempt of job {job.id}.")
    assert job.owner is not None
    job = hub.jobs_store.started(job.id, job.owner, body.handle)
    _beat(hub, job)  # it may have waited in its engine's queue until its lease has run out
    folder = hub.jobs_dir / job.id
    lay_out(folder, job)
    files = [folder / name for name in GROWING]
    return Started(
        job=job,
        token=attempt_token(job, hub.secret_key),
        variables=dict(hub.elsewhere.variables_of(job)),
        unsealed=unseal(job.spec.sealed_env, hub.secret_key),
        # These two are about this machine, and the URL may have a password.
        settings=hub.elsewhere.settings.model_copy(update={"database_url": None, "preload": None}),
        sizes={file.name: file.stat().st_size for file in files if file.exists()},
    )


@router.post("/beat")
async def extend(
    request: Request, hub: HubOf, job: Begun, name: str | None = None, offset: int = 0
) -> Orders:
    """The body is what comes at `offset` of the file `name`. If it is sent again, because its
    answer was lost, nothing changes."""
    # First, because the disk may be full.
    orders = await run_in_threadpool(_beat, hub, job)
    if name is not None:
        if name not in GROWING or not 0 <= offset <= _MAX_OFFSET:
            raise BadRequest(f"{name!r} from {offset} is no part of {' or '.join(GROWING)}.")
        path = hub.jobs_dir / job.id / name
        path.touch()
        with path.open("r+b") as file:
            file.seek(offset)
            async for chunk in chunks(request, max_bytes=PIECE_BYTES):
                await run_in_threadpool(file.write, chunk)
    return orders


def _beat(hub: HubOf, job: Job) -> Orders:
    return beat(hub.jobs_store, job, hub.elsewhere.settings)


@router.post("/finish")
async def finish(
    hub: HubOf, job: Begun, body: Annotated[Finish, json_body(Finish, max_bytes=_MAX_FINISH_BYTES)]
) -> Finished:
    """Record the end. The release of a retraining is taken from the branch of the attempt before,
    which may take minutes. Until then, the hub extends the lease in the agent's place."""
    ending = asyncio.create_task(run_in_threadpool(_end, hub, job, body))
    seconds = hub.elsewhere.settings.heartbeat_seconds
    while not (await asyncio.wait({ending}, timeout=seconds))[0]:
        with suppress(LeaseLost):  # it has just been recorded, or `_end` raises the same
            await run_in_threadpool(_beat, hub, job)
    return Finished(state=(await ending).state)


def _end(hub: HubOf, job: Job, finish: Finish) -> Job:
    folder = hub.jobs_dir / job.id
    for name, text in finish.records.items():
        if not is_record(name):
            raise BadRequest(f"A job must not write {name!r}.")
        write_by_rename(folder / name, text)
    outcome = finish.outcome
    may_promote = job.spec.pipeline is not None
    if may_promote and outcome is not None and outcome.result in ("published", "unchanged"):
        branch = branch_of(job.id, job.attempt)
        outcome = hub.elsewhere.take(
            job, outcome, lambda name: take_release(hub.releases, pipeline=name, revision=branch)
        )
        write_by_rename(folder / OUTCOME, outcome.model_dump_json(indent=2))
    return record_result(hub.jobs_store, job, finish.lost or outcome, hub.elsewhere.settings)


def _sent(request: Request) -> str:
    return sent_token(request.scope).decode("ascii", "replace")
