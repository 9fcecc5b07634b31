"""Runs a retraining job, stage by stage: snapshot → data → measure → train → evaluate → export →
promote.

Most stages leave a record in the job's folder. A restarted job does not download or train again
what the records show as done; it measures again. Environment variables describe the job: `JOB_DIR`
(the folder with `spec.json`), `JOB_ID`, `HF_ENDPOINT` and `HF_TOKEN` (the hub), and
`PIPELINE_SERVER_URL` and `PIPELINE_ADMIN_TOKEN` (the server).
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Literal

import httpx

from jobs.counts import Counts
from jobs.errors import TEMPORARY_FAILURE, is_temporary
from jobs.folder import OUTCOME
from jobs.outcome import JobOutcome
from pipeline.errors import PipelineError
from pipeline.retrain import checkpoint_store
from pipeline.retrain.data import TrainingData, compare_revisions, is_unchanged, report_on
from pipeline.retrain.errors import (
    BaseModelError,
    DataError,
    PromoteError,
    SwapMaySucceedLater,
    TemporaryError,
)
from pipeline.retrain.job import (
    CHECKPOINT,
    EVALUATION,
    PARAPHRASES_DIR,
    RELEASE,
    SNAPSHOT,
    DatasetSnapshot,
    Parent,
    RetrainJob,
    damaged_releases,
    find_parent,
    read_record,
    take_snapshot,
    write_record,
)
from pipeline.retrain.paraphrasing import paraphrased
from serving.errors import NotEnoughSpace, ServingError, Superseded, SwapAnswerError
from serving.swap_schemas import SwapResult, request_swap
from serving.weights.publish import publish_folder
from serving.weights.release import Lineage, Release
from serving.weights.release_store import clear_pending, prune, served_or_empty, set_pending

logger = logging.getLogger("pipeline.retrain")

PATIENCE_SECONDS = 120.0
"""How long to keep asking if the server defers the swap, or if the connection breaks before it
answers."""
RETRY_SECONDS = 1.0

Promotion = tuple[Literal["promoted", "published", "superseded"], str | None]
"""How the request for a swap ended, and why."""


def main(
    environ: Mapping[str, str] = os.environ,
    job_of: Callable[[Mapping[str, str]], RetrainJob] = RetrainJob.from_environment,
) -> int:
    """Run the job that `environ` describes. Returns the exit code: 0 unless the job failed."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for client in ("httpx", "httpx2"):  # they log each request
        logging.getLogger(client).setLevel(logging.WARNING)
    job: RetrainJob | None = None
    try:
        job = job_of(environ)
        outcome = retrain(job)
    except Exception as error:
        if isinstance(error, PipelineError | ServingError):
            logger.error("%s", error)
            reason = " ".join(str(error).split())
        else:
            logger.exception("the job failed with an unexpected error")
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            reason = f"{said} (unexpected; the job's log has the traceback)"
        failed = JobOutcome(result="failed", exit_code=1, job_id=environ.get("JOB_ID"))
        outcome = failed if job is None else job.outcome("failed")
        may_pass = isinstance(error, TemporaryError | NotEnoughSpace) or is_temporary(error)
        outcome = outcome.model_copy(update={"reason": reason, "may_pass": may_pass})
    logger.info("%s %s", outcome.result, outcome.reason or "")
    if "JOB_DIR" in environ:
        try:
            write_record(Path(environ["JOB_DIR"]) / OUTCOME, outcome)
        except OSError as error:
            if not is_temporary(error):
                raise
            logger.error("the outcome cannot be written: %s", error)
            return TEMPORARY_FAILURE
    return outcome.exit_code or 0


def retrain(job: RetrainJob) -> JobOutcome:
    """Run the job to its end. Raises RetrainError or ReleaseError if a stage fails.

    The job continues from the chosen release (its parent). If somebody has chosen another release
    when the job wants to serve its own, the job starts again from that release. Otherwise a
    rollback would be undone, because the new release would contain what the rollback has removed.
    """
    while True:
        try:
            outcome = _retrain(job)
            _clear_away(job)
            return outcome
        except Superseded as moved:
            if job.trained_folder is not None:
                return job.outcome("superseded", str(moved))
            logger.warning("%s; the job starts again from there", moved)
            job.remove_records()
            job.progress.clear()


def _retrain(job: RetrainJob) -> JobOutcome:
    not_judged = None
    snapshot = read_record(job.dir / SNAPSHOT, DatasetSnapshot)
    release = read_record(job.dir / RELEASE, Release)
    if snapshot is not None and release is not None:
        # The job was restarted after it had published its release.
        job.record_progress(
            dataset_revision=release.lineage.dataset_revision,
            parent_release=release.lineage.parent,
            counts=Counts.model_validate((release.evaluation or {}).get("counts", {})),
        )
    else:
        snapshot, parent = _snapshot(job)
        try:
            data = _data(job, snapshot, parent)
            # If a damaged release was passed over, the job must publish a whole one, even if no
            # row changed.
            is_needed = job.trained_folder is not None or snapshot.passed_over
            if not is_needed and is_unchanged(data, parent, job.settings):
                return job.outcome("unchanged")
            refusals, release = _learn(job, snapshot, parent, data)
        except (DataError, BaseModelError) as error:
            if job.trained_folder is None or isinstance(error, TemporaryError):
                raise
            # The user's own trainer may read rows, and train networks, that this package does not.
            not_judged = f"not judged by the rows: {error}"
            logger.warning("%s", not_judged)
            release = publish_folder(
                job.pipeline_dir, job.trained_folder, lineage=_origin(job, snapshot, parent)
            )
        if release is None:
            return job.outcome("rejected", "; ".join(refusals))
    job.record_progress(release=release.id)

    with job.stage("promote"):
        promotion: Promotion = ("published", None)
        if job.elsewhere is not None:
            job.elsewhere.upload(job.pipeline_dir / release.id)
        else:
            promotion = promote(
                job.pipeline_dir,
                release.id,
                # A server may still serve a damaged release from memory.
                instead_of=(snapshot.parent, release.id, *snapshot.passed_over),
                server_url=job.server_url,
                token=job.server_token,
            )
    result, reason = promotion
    forced = release.lineage.forced
    reasons = (
        reason,
        f"forced past the gate: {forced}" if forced else None,
        (release.evaluation or {}).get("not_learned"),
        not_judged,
    )
    return job.outcome(result, "; ".join(filter(None, reasons)) or None)


def _snapshot(job: RetrainJob) -> tuple[DatasetSnapshot, Parent | None]:
    with job.stage("snapshot"):
        wanted = job.revisions.new_sha if job.revisions is not None else None
        job.record_progress(dataset_revision=wanted)
        if job.elsewhere is not None:
            job.elsewhere.fetch_chosen(job.pipeline_dir)
        damaged = damaged_releases(job.pipeline_dir)
        parent = find_parent(job.pipeline_dir, damaged)
        parent_id = parent.id if parent is not None else None
        if job.trained_from not in (None, parent_id):
            raise Superseded(str(job.trained_folder), parent_id)
        for release_id, reasons in damaged.items():
            logger.warning(
                "passing over release %s, which is damaged: %s", release_id, "; ".join(reasons)
            )
        snapshot = read_record(job.dir / SNAPSHOT, DatasetSnapshot)
        if snapshot is None or snapshot.parent != parent_id:
            # The job is new, or another release was chosen since it was interrupted.
            job.remove_records()
            if damaged:
                logger.warning("the job goes on from %s", parent_id or "the base model")
            snapshot = take_snapshot(job.source, job.settings.ref, wanted, parent)
            snapshot = snapshot.model_copy(update={"passed_over": tuple(damaged)})
            write_record(job.dir / SNAPSHOT, snapshot)
        job.record_progress(dataset_revision=snapshot.revision.sha)
        url, asks_others = job.settings.train.checkpoint_url, job.settings.paraphrase is not None
        if url is not None:
            # A training with another parent is another one.
            training = f"{url}/{job.id}/{snapshot.revision.sha[:12]}-{parent_id}"
            # Other wordings would be different ones on another machine.
            checkpoint_store.use(training, job.dir, goes_on=not asks_others)
    return snapshot, parent


def _data(job: RetrainJob, snapshot: DatasetSnapshot, parent: Parent | None) -> TrainingData:
    with job.stage("data"):
        data = compare_revisions(snapshot, parent, job.settings)
        for line in report_on(data.dataset, data.rows, data.held_out):
            logger.info("%s", line)
        logger.info("a %s training: %s", data.mode, data.reason)
    return data


def _learn(
    job: RetrainJob, snapshot: DatasetSnapshot, parent: Parent | None, data: TrainingData
) -> tuple[tuple[str, ...], Release | None]:
    """Measure, train, and measure again. Then publish the new weights, if the gate accepts them or
    a person has forced the job. Returns the reasons of the gate if it refuses, and otherwise the
    release."""
    # Import this only here, because a job without anything to learn needs no torch.
    from pipeline.retrain.evaluate import lost_refusals
    from pipeline.retrain.learning import Learning

    with job.stage("measure"):
        refusals = lost_refusals(data.num_lost, data.num_before, job.settings.gate)
        if refusals and job.settings.force_reason is None:
            return refusals, None
        larger = job.settings.paraphrase
        if larger is not None and job.trained_folder is None:
            file = job.settings.bases_dir / PARAPHRASES_DIR / f"{job.settings.pipeline}.jsonl"
            data = paraphrased(
                data, larger, file, job.paraphrase_token, asks=not (job.dir / CHECKPOINT).exists()
            )
        learning = Learning(job, data, parent)

    while True:
        with job.stage("train"):
            checkpoint = learning.train()
            job.record_progress(
                parent_release=parent.id if parent and learning.data.mode == "delta" else None
            )
            logger.info("%d tokens in %d steps", checkpoint.tokens, checkpoint.step)
        with job.stage("evaluate"):
            evaluation = learning.evaluate(checkpoint)
            write_record(job.dir / EVALUATION, evaluation)
            job.record_progress(counts=evaluation.counts)
            logger.info("%s", evaluation.counts)
            if evaluation.not_learned is not None:
                logger.info("%s", evaluation.not_learned)
            for refusal in evaluation.refusals:
                logger.info("refused: %s", refusal)
        if not learning.turn_to_full_if_refused(evaluation):
            break
    if not evaluation.passed and job.settings.force_reason is None:
        return evaluation.refusals, None

    with job.stage("export"):
        release = learning.export(evaluation, _origin(job, snapshot, parent))
        write_record(job.dir / RELEASE, release)
    return (), release


def _origin(job: RetrainJob, snapshot: DatasetSnapshot, parent: Parent | None) -> Lineage:
    """The lineage of a release of this job, without what only the training knows. For a full
    training, `Learning.export` takes `parent` and `dataset_base_revision` out again."""
    base = snapshot.base if job.trained_folder is None else None
    return Lineage(
        parent=parent.id if parent is not None else None,
        dataset=job.settings.dataset,
        dataset_ref=job.settings.ref,
        dataset_revision=snapshot.revision.sha,
        dataset_base_revision=base.sha if base is not None else None,
        job_id=job.id,
        delivery_ids=job.revisions.delivery_ids if job.revisions is not None else (),
    )


def _clear_away(job: RetrainJob) -> None:
    """Remove releases and dataset revisions that are too old for a rollback. Checkpoints are not
    removed here. They are needed until the outcome is written: if the job is killed before, it must
    not train again."""
    try:
        removed = prune(job.pipeline_dir, job.settings.keep)
        if removed:
            logger.info("pruned %s", ", ".join(removed))
        parent = find_parent(job.pipeline_dir)
        seen = parent.lineage.dataset_revision if parent is not None else None
        job.source.forget_others(*filter(None, (job.progress.get("dataset_revision"), seen)))
    except Exception:
        # This failure must not change the outcome of the job. The next job tries again to remove
        # them.
        logger.exception("not everything old could be removed")


def promote(
    pipeline_dir: Path,
    release_id: str,
    *,
    instead_of: Collection[str | None],
    server_url: str | None,
    token: str | None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Promotion:
    """Choose the release, and ask the server to swap to it. If no server runs, the release stays
    marked as pending, and the next server that starts takes it. Raises PromoteError if the server
    refuses, and SwapMaySucceedLater if the server still defers the swap after `patience_seconds`,
    or if its engine or disk fails.

    instead_of: the releases of which one must be the chosen release (None: no release): the one
    that this release was trained from, and this release itself, if an earlier attempt of the job
    has chosen it. Raises Superseded if somebody has chosen another one while the job trained. If
    somebody does so after this release was chosen, the other one stays chosen.
    """
    earlier = set_pending(pipeline_dir, release_id, instead_of=instead_of)
    if server_url is None:
        return _published("no server is configured")
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            result = request_swap(server_url, release_id, token=token, instead_of=instead_of)
        except httpx.ConnectError:
            return _published(f"no server at {server_url}")
        except httpx.TransportError as error:
            logger.warning("the connection broke during the swap: %r", error)
            if time.monotonic() >= deadline:
                return _published(f"{server_url} gave no answer ({error!r})")
        except SwapAnswerError as error:
            # The job fails, so no later start of a server may serve its release.
            clear_pending(pipeline_dir, release_id, earlier=earlier)
            raise PromoteError(
                f"{error}; is it this pipeline's server, and PIPELINE_ADMIN_TOKEN its token?"
            ) from None
        else:
            if result.result in ("refused", "failed"):
                # The server clears the mark only after a swap that it has begun.
                clear_pending(pipeline_dir, release_id, earlier=earlier)
            if result.result != "deferred":
                return _promotion(result, pipeline_dir, release_id)
            logger.info("the server defers the swap: %s", "; ".join(result.reasons))
            if time.monotonic() >= deadline:
                raise SwapMaySucceedLater(
                    f"{server_url} deferred the swap to {release_id} for {patience_seconds:g} s: "
                    f"long requests hold it up; try `pipeline releases swap {release_id}` later"
                )
            # A deferred release stays the chosen one, unless somebody chooses another one: also the
            # parent, which is still live.
            instead_of = (release_id,)
        time.sleep(RETRY_SECONDS)
        if (chosen := served_or_empty(pipeline_dir).chosen) not in instead_of:
            return "superseded", f"release {chosen} was taken instead"


def _published(why: str) -> Promotion:
    return "published", f"{why}; the next server to start serves it"


def _promotion(result: SwapResult, pipeline_dir: Path, release_id: str) -> Promotion:
    if result.result == "live":
        return "promoted", None
    if result.result == "superseded":
        clear_pending(pipeline_dir, release_id)
        return "superseded", f"release {result.superseded_by} was taken instead"
    error = SwapMaySucceedLater if result.result == "failed" else PromoteError
    raise error(
        f"the server did not take {release_id} ({result.phase}): "
        + ("; ".join(result.reasons) or f"{result.result}, and it gave no reason")
    )
