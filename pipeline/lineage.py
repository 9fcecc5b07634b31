"""The lineage of a release that the user's own trainer publishes."""

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
    """The job, pipeline and commit of the process that publishes. All fields are empty if this
    process is not part of a job."""

    job_id: str | None = None
    pipeline: str | None = None
    """None also in a job whose command was submitted without a pipeline."""
    dataset: str | None = None
    ref: str | None = None
    revision: str | None = None
    delivery_ids: tuple[str, ...] = ()


def job_context(environment: Mapping[str, str]) -> JobContext:
    """The context of the job whose environment variables these are.

    The commit comes from the job's spec. The spec of a plain command names no commit; it then comes
    from the job's payload. Raises PipelineError if `JOB_DIR` contains no readable spec.
    """
    if "JOB_ID" not in environment or "JOB_DIR" not in environment:
        return JobContext()
    file = Path(environment["JOB_DIR"]) / SPEC
    try:
        spec = JobSpec.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise PipelineError(
            f"JOB_DIR is set, but {file} is not the spec of a job; if this is not a job, unset "
            "JOB_ID and JOB_DIR"
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
        ref=update.ref if update else None,
        revision=(update.newSha if update else None) or payload.repo.headSha,
    )


def lineage(
    context: JobContext, *, parent: str | None, served: str | None, revision: str | None
) -> Lineage:
    """The lineage of a release that is published now.

    `parent` and `revision` are what the trainer gave as options. In a job, None as `parent` means
    the served release, and None as `revision` means the job's commit.
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
