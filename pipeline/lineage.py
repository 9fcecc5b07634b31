"""Where a release of a trainer of one's own comes from: what its job was told, and what it says."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from jobs.folder import SPEC
from jobs.spec import JobSpec
from pipeline.errors import PipelineError
from receiver.payload import WebhookPayload
from serving.weights.release import Lineage


@dataclass(frozen=True, kw_only=True)
class Told:
    """What a job was told."""

    job_id: str | None = None
    pipeline: str | None = None
    """That it is a job of; None outside of a job, and for a command on its own."""
    dataset: str | None = None
    ref: str | None = None
    revision: str | None = None
    delivery_ids: tuple[str, ...] = ()


def told_by_job(environment: Mapping[str, str]) -> Told:
    """From the job whose environment this is: its spec, else the payload of a command on its own.

    Nothing but Nones outside of a job. Raises PipelineError for a job folder that is none.
    """
    if "JOB_ID" not in environment or "JOB_DIR" not in environment:
        return Told()
    file = Path(environment["JOB_DIR"]) / SPEC
    try:
        spec = JobSpec.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise PipelineError(
            f"JOB_DIR says that this is a job, and {file} tells of none; unset JOB_ID and JOB_DIR"
        ) from None
    told = Told(job_id=environment["JOB_ID"], pipeline=spec.pipeline)
    if spec.revisions is not None:
        return replace(
            told,
            dataset=spec.revisions.repo,
            ref=spec.revisions.ref,
            revision=spec.revisions.new_sha,
            delivery_ids=spec.revisions.delivery_ids,
        )
    payload = _payload(environment)
    if payload is None or payload.repo.type != "dataset":
        return told
    update = next(iter(payload.updatedRefs or ()), None)
    return replace(
        told,
        dataset=payload.repo.name,
        ref=update.ref if update else None,
        revision=(update.newSha if update else None) or payload.repo.headSha,
    )


def lineage(told: Told, *, parent: str | None, served: str | None, revision: str | None) -> Lineage:
    """Of a release that is published now.

    parent, revision: what the trainer says of itself. In a job the parent is the served release
    and the revision the job's, where it says nothing.
    """
    return Lineage(
        parent=parent or (served if told.job_id is not None else None),
        dataset=told.dataset,
        dataset_ref=told.ref,
        dataset_revision=revision or told.revision,
        job_id=told.job_id,
        delivery_ids=told.delivery_ids,
    )


def _payload(environment: Mapping[str, str]) -> WebhookPayload | None:
    try:
        text = Path(environment["WEBHOOK_PAYLOAD_FILE"]).read_text()
        return WebhookPayload.model_validate(json.loads(text))
    except (KeyError, OSError, ValueError):
        return None
