"""Finds the lineage of a release that `pipeline releases publish` makes. The lineage names the
parent release, the dataset commit and the job from which the release comes. A person can run this
command, and a job can run it too, for example if the job runs the user's own trainer (the setting
`command`)."""

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
class JobContext:
    """The job, the pipeline and the commit for which this process publishes a release. All fields
    have their defaults if this process is not part of a job."""

    job_id: str | None = None
    pipeline: str | None = None
    """Also None if the job is a command that was submitted without a pipeline."""
    dataset: str | None = None
    ref: str | None = None
    revision: str | None = None
    delivery_ids: tuple[str, ...] = ()


def job_context(environment: Mapping[str, str]) -> JobContext:
    """The context of the job that has these environment variables.

    The commit comes from the job's spec. But if a person submitted the job as a command, the spec
    names no commit. Then the commit comes from the first ref in the job's payload. Raises PipelineError if `JOB_DIR`
    contains no readable spec.
    """
    if "JOB_ID" not in environment or "JOB_DIR" not in environment:
        return JobContext()
    file = Path(environment["JOB_DIR"]) / SPEC
    try:
        spec = JobSpec.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise PipelineError(
            f"JOB_DIR is set, but {file} is not the spec of a job; if you run this command "
            "outside a job, unset JOB_ID and JOB_DIR"
        ) from None
    context = JobContext(
        job_id=environment["JOB_ID"],
        pipeline=spec.pipeline or environment.get("PIPELINE_NAME"),
    )
    if spec.revisions is not None:
        return replace(
            context,
            dataset=spec.revisions.repo,
            ref=spec.revisions.ref,
            revision=spec.revisions.new_sha,
            delivery_ids=spec.revisions.delivery_ids,
        )
    payload = _payload(environment)
    if payload is None or payload.repo.type != "dataset":
        return context
    update = next(iter(payload.updatedRefs or ()), None)
    return replace(
        context,
        dataset=payload.repo.name,
        ref=None if update is None else update.ref,
        revision=payload.repo.headSha if update is None else update.newSha,
    )


def lineage(
    context: JobContext, *, parent: str | None, served: str | None, revision: str | None
) -> Lineage:
    """The lineage of a release that is published now.

    `parent` and `revision` are options of `pipeline releases publish`; each is None if the caller
    of this command left the option out. `served` is the id of the served release, or None if no
    release is served. In a job, `served` replaces a missing `parent`, and the job's commit replaces
    a missing `revision`.
    """
    return Lineage(
        parent=parent or (served if context.job_id is not None else None),
        dataset=context.dataset,
        dataset_ref=context.ref,
        dataset_revision=revision or context.revision,
        job_id=context.job_id,
        delivery_ids=context.delivery_ids,
    )


def _payload(environment: Mapping[str, str]) -> WebhookPayload | None:
    try:
        text = Path(environment["WEBHOOK_PAYLOAD_FILE"]).read_text()
        return WebhookPayload.model_validate(json.loads(text))
    except (KeyError, OSError, ValueError):
        return None
