"""Runs a retraining job, stage by stage: snapshot → data → measure → train → evaluate → export →
promote.

Most stages leave a record in the job's folder. A restarted job skips the stages that are done,
according to the records.
"""

import logging
import shutil

from jobs.counts import Counts
from jobs.outcome import JobOutcome
from pipeline.retrain import job_folder
from pipeline.retrain.data import TrainingData, compare_revisions, is_unchanged
from pipeline.retrain.errors import BaseModelError, DataError, TemporaryError
from pipeline.retrain.gate import lost_refusals
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.parent import Parent, damaged_releases, find_parent
from pipeline.retrain.promote import promote
from pipeline.retrain.report import report_on
from pipeline.retrain.snapshot import DatasetSnapshot, take_snapshot
from serving.errors import Superseded
from serving.weights.publish import publish_folder
from serving.weights.release import Lineage, Release
from serving.weights.release_store import prune

logger = logging.getLogger(__name__)


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
            if job.trained is not None:
                return job.outcome("superseded", str(moved))
            logger.warning("%s; the job starts again from there", moved)
            _forget_progress(job)


def _retrain(job: RetrainJob) -> JobOutcome:
    not_judged = None
    snapshot, release = _published_before(job)
    if snapshot is None or release is None:
        snapshot, parent = _snapshot(job)
        try:
            data = _data(job, snapshot, parent)
            # If a damaged release was passed over, the job must publish a whole one, even if no
            # row changed.
            is_needed = job.trained is not None or snapshot.passed_over
            if not is_needed and is_unchanged(data, parent, job.settings):
                return job.outcome("unchanged")
            refusals, release = _learn(job, snapshot, parent, data)
        except (DataError, BaseModelError) as error:
            if job.trained is None or isinstance(error, TemporaryError):
                raise
            # The user's own trainer may read rows, and train networks, that this package does not.
            not_judged = f"not judged by the rows: {error}"
            logger.warning("%s", not_judged)
            release = publish_folder(
                job.pipeline_dir, job.trained, lineage=_origin(job, snapshot, parent)
            )
        if release is None:
            return job.outcome("rejected", "; ".join(refusals))
    job.record_progress(release=release.id)

    with job.stage("promote"):
        promotion = promote(
            job.pipeline_dir,
            release.id,
            # A server may still serve a damaged release from memory.
            instead_of=(snapshot.parent, release.id, *snapshot.passed_over),
            server_url=job.server_url,
            admin_token=job.admin_token,
        )
    forced = release.lineage.forced
    reasons = (
        promotion.reason,
        f"forced past the gate: {forced}" if forced else None,
        (release.evaluation or {}).get("not_learned"),
        not_judged,
    )
    return job.outcome(promotion.result, "; ".join(filter(None, reasons)) or None)


def _published_before(job: RetrainJob) -> tuple[DatasetSnapshot | None, Release | None]:
    """The snapshot and the release of this job, if the job was restarted after it had published its
    release. Otherwise (None, None)."""
    snapshot = job_folder.read_record(job.dir / job_folder.SNAPSHOT, DatasetSnapshot)
    release = job_folder.read_record(job.dir / job_folder.RELEASE, Release)
    if snapshot is None or release is None:
        return None, None
    job.record_progress(
        dataset_revision=release.lineage.dataset_revision,
        parent_release=release.lineage.parent,
        counts=Counts.model_validate((release.evaluation or {}).get("counts", {})),
    )
    return snapshot, release


def _snapshot(job: RetrainJob) -> tuple[DatasetSnapshot, Parent | None]:
    with job.stage("snapshot"):
        wanted = job.revisions.new_sha if job.revisions is not None else None
        job.record_progress(dataset_revision=wanted)
        damaged = damaged_releases(job.pipeline_dir)
        parent = find_parent(job.pipeline_dir, damaged)
        parent_id = parent.id if parent is not None else None
        if job.trained_from not in (None, parent_id):
            raise Superseded(str(job.trained), parent_id)
        for release_id, reasons in damaged.items():
            logger.warning(
                "passing over release %s, which is damaged: %s", release_id, "; ".join(reasons)
            )
        snapshot = job_folder.read_record(job.dir / job_folder.SNAPSHOT, DatasetSnapshot)
        if snapshot is None or not snapshot.is_whole or snapshot.parent != parent_id:
            # The job is new, or another release was chosen since it was interrupted.
            _forget_progress(job)
            if damaged:
                logger.warning("the job goes on from %s", parent_id or "the base model")
            snapshot = take_snapshot(job.hub, job.settings.ref, wanted, parent)
            snapshot = snapshot.model_copy(update={"passed_over": tuple(damaged)})
            job_folder.write_record(job.dir / job_folder.SNAPSHOT, snapshot)
        job.record_progress(dataset_revision=snapshot.revision.sha)
    return snapshot, parent


def _data(job: RetrainJob, snapshot: DatasetSnapshot, parent: Parent | None) -> TrainingData:
    with job.stage("data"):
        data = compare_revisions(snapshot, parent, job.settings)
        for line in report_on(data.dataset, data.rows, data.held_out).lines():
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
    from pipeline.retrain.evaluate import Evaluation
    from pipeline.retrain.learning import Learning

    with job.stage("measure"):
        refusals = lost_refusals(data.num_lost, data.num_before, job.settings.gate)
        if refusals and job.settings.force_reason is None:
            return refusals, None
        learning = Learning(job, data, parent)

    path = job.dir / job_folder.EVALUATION
    evaluation = job_folder.read_record(path, Evaluation)
    round_number: int | None = learning.first_round(evaluation)
    while round_number is not None:
        with job.stage("train"):
            checkpoint = learning.train(round_number)
            job.record_progress(
                parent_release=parent.id if parent and learning.data.mode == "delta" else None
            )
            logger.info("%d tokens in %d steps", checkpoint.tokens, checkpoint.step)
        with job.stage("evaluate"):
            if evaluation is None or evaluation.round != round_number:
                evaluation = learning.evaluate(checkpoint, refusals)
                job_folder.write_record(path, evaluation)
            job.record_progress(counts=evaluation.counts)
            logger.info("%s", evaluation.counts)
            if evaluation.not_learned is not None:
                logger.info("%s", evaluation.not_learned)
            for refusal in evaluation.refusals:
                logger.info("refused: %s", refusal)
        round_number = learning.round_after(evaluation)
    assert evaluation is not None
    if not evaluation.passed and job.settings.force_reason is None:
        return evaluation.refusals, None

    with job.stage("export"):
        release = learning.export(evaluation, _origin(job, snapshot, parent))
        job_folder.write_record(job.dir / job_folder.RELEASE, release)
    return (), release


def _origin(job: RetrainJob, snapshot: DatasetSnapshot, parent: Parent | None) -> Lineage:
    """The lineage of a release of this job, without what only the training knows."""
    base = snapshot.base if job.trained is None else None
    return Lineage(
        parent=parent.id if parent is not None else None,
        dataset=snapshot.dataset,
        dataset_ref=snapshot.ref,
        dataset_revision=snapshot.revision.sha,
        dataset_base_revision=base.sha if base is not None else None,
        job_id=job.id,
        delivery_ids=job.revisions.delivery_ids if job.revisions is not None else (),
    )


def _forget_progress(job: RetrainJob) -> None:
    """Remove the records of the job, so that it starts again.

    The snapshot is removed last. If the job is killed before that, the restarted job finds again
    that another release is chosen. A release that this job has published stays on disk, but this
    job does not ask the server to serve it.
    """
    (job.dir / job_folder.CHECKPOINT).unlink(missing_ok=True)
    shutil.rmtree(job.dir / job_folder.CHECKPOINTS_DIR, ignore_errors=True)
    for record in (job_folder.BASE, job_folder.EVALUATION, job_folder.RELEASE, job_folder.SNAPSHOT):
        (job.dir / record).unlink(missing_ok=True)


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
        job.hub.forget_others(*filter(None, (job.progress.dataset_revision, seen)))
    except Exception:
        # This failure must not change the outcome of the job. The next job tries again to remove
        # them.
        logger.exception("not everything old could be removed")
