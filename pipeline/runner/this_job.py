"""The job of which this process is a part."""

import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from jobs.folder import SPEC
from jobs.spec import DEFAULT_BRANCH, JobSpec, RevisionRange
from pipeline.errors import PipelineError
from receiver.payload import WebhookPayload
from serving.weights.release import Lineage


def spec_of_job(environment: Mapping[str, str]) -> JobSpec | None:
    """The spec of the job that has these environment variables; None outside a job. Raises
    PipelineError if `JOB_DIR` contains no readable spec."""
    if "JOB_ID" not in environment or "JOB_DIR" not in environment:
        return None
    file = Path(environment["JOB_DIR"]) / SPEC
    try:
        return JobSpec.model_validate_json(file.read_bytes())
    except (OSError, ValidationError):
        raise PipelineError(
            f"{file} is not the spec of a job; outside a job, unset JOB_ID and JOB_DIR"
        ) from None


def pipeline_of_job(environment: Mapping[str, str]) -> str | None:
    """Also None if the job is a command that was submitted without a pipeline."""
    spec = spec_of_job(environment)
    return None if spec is None else spec.pipeline or environment.get("PIPELINE_NAME")


def lineage_of_job(environment: Mapping[str, str], ref: str) -> Lineage:
    """The job and the commit for which it runs; all fields are None or empty outside a job.

    The commit comes from the job's spec. But if a person submitted the job as a command, the spec
    names no commit. Then it is the commit to which the push in the job's payload moved `ref` or, if
    it did not move `ref`, the first ref that it moved.
    """
    spec = spec_of_job(environment)
    if spec is None:
        return Lineage()
    commit = spec.revisions or _commit_of_payload(environment, ref)
    if commit is None:
        return Lineage(job_id=environment["JOB_ID"])
    return Lineage(
        job_id=environment["JOB_ID"],
        dataset=commit.repo,
        dataset_ref=commit.ref,
        dataset_revision=commit.new_sha,
        delivery_ids=commit.delivery_ids,
    )


def _commit_of_payload(environment: Mapping[str, str], ref: str) -> RevisionRange | None:
    try:
        text = Path(environment["WEBHOOK_PAYLOAD_FILE"]).read_text()
        payload = WebhookPayload.model_validate(json.loads(text))
    except (KeyError, OSError, ValueError):
        return None
    if payload.repo.type != "dataset":
        return None
    moved = {update.ref: update.newSha for update in payload.updatedRefs or ()}
    found = ref if ref in moved else next(iter(moved), DEFAULT_BRANCH)
    sha = moved.get(found) or payload.repo.headSha
    return RevisionRange(repo=payload.repo.name, ref=found, new_sha=sha)
