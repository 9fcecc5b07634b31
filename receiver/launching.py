"""`launch_job`: what a handler calls if its work must not be lost."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from receiver.errors import NoJobStore
from receiver.payload import WebhookPayload
from receiver.project import state_dir

if TYPE_CHECKING:
    from jobs.store import JobStore

HANDLED: ContextVar[tuple[str, str] | None] = ContextVar("HANDLED", default=None)
"""The delivery for which a handler is called now: the path of the handler, and the delivery's id.
None outside of a handler."""


def launch_job(
    command: Sequence[str],
    payload: WebhookPayload | Mapping[str, Any],
    *,
    store: str | Path | None = None,
) -> str:
    """Submit a job that runs `command`, and return the id of the job.

    When this function returns, the job is on disk. The stack's runner starts it now or, if no stack
    is up, at the next `pipeline up`. The command finds `payload` in its environment variable
    `WEBHOOK_PAYLOAD`. If the sender repeats the delivery that is being handled, the same call
    returns the same job, unless this job has failed or was cancelled.

    Args:
        command: The program and its arguments. The job runs in a folder of its own, so use absolute
            paths.
        store: The URL or the file of the job store. Default: `$PIPELINE_JOBS__DATABASE_URL`, or the
            file in the state folder of the project.

    Raises:
        NoJobStore: There is no such file, because no stack was ever up there.
        StoreError: The store failed. The handler should let this error pass: the sender then gets
            an error, and repeats the delivery.
    """
    from jobs.spec import JobSpec
    from jobs.store import Delivery

    given = store or os.environ.get("PIPELINE_JOBS__DATABASE_URL")
    where = str(given or state_dir() / "jobs" / "jobs.sqlite")
    if "://" not in where and not Path(where).exists():
        raise NoJobStore(
            f"There is no job store {where}: start the stack once (`pipeline up`), run this"
            ' program in its project or after `eval "$(pipeline env)"`, or pass `store`.'
        )
    if isinstance(payload, WebhookPayload):
        payload = payload.model_dump(mode="json", exclude_unset=True)
    delivery = None
    if (handled := HANDLED.get()) is not None:
        path, id = handled
        # A handler may launch several jobs for one delivery, so the source names the command too.
        digest = hashlib.sha256(json.dumps(list(command)).encode()).hexdigest()
        delivery = Delivery(source=f"{path} {digest}", id=id)
    return (
        _opened(where)
        .submit(JobSpec(command=tuple(command)), payload=dict(payload), delivery=delivery)
        .job.id
    )


@cache
def _opened(where: str) -> "JobStore":
    from jobs.store import JobStore

    return JobStore.open(where)
