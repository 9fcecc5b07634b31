"""`RetrainJob`: the settings of a retraining job, its addresses and tokens, its progress, and its
outcome; and the files in its folder.

A job starts from a release, from which it continues (`Parent`), and from the dataset revision to
train on with the one to compare it with, both downloaded (`DatasetSnapshot`).

Most stages leave a record in the folder: a JSON file that is written completely or not at all.
`metrics.jsonl` has the stages and the losses while the job runs, one JSON object per line.
"""

import json
import logging
import shutil
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.errors import is_temporary
from jobs.folder import METRICS, SPEC
from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec, RevisionRange
from pipeline.retrain.elsewhere import ReleasesOnHub
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.settings import RetrainSettings
from pipeline.retrain.sources import OWN_TOKEN, Hubs, Revision, Source
from serving.weights.atomic_file import write_atomically
from serving.weights.release import Lineage
from serving.weights.release_store import load_release, read_served, release_number
from serving.weights.verify import verify_release

logger = logging.getLogger(__name__)

Record = TypeVar("Record", bound=BaseModel)

SNAPSHOT = "snapshot.json"
BASE = "base.json"
CHECKPOINT = "checkpoint.json"
EVALUATION = "evaluation.json"
RELEASE = "release.json"
WRONG = "wrong.json"
PARAPHRASES_DIR = "paraphrases"
"""The folder of a larger model's other wordings, under `bases/`. Each pipeline has a file."""
PARAPHRASE_TOKEN = "PARAPHRASE_TOKEN"
"""The environment variable with the token of the larger model's server."""
PROMOTION_DIR = "promotion"
"""The folder of these records, in that of a job whose own trainer has trained."""
CHECKPOINTS_DIR = "checkpoints"

Stage = Literal["snapshot", "data", "measure", "train", "evaluate", "export", "promote"]
Event = Literal["start", "end", "step", "evaluation", "measured", "answered"]


def write_record(path: Path, record: BaseModel) -> None:
    """Write `record` to `path` as JSON. After a crash or a power cut, the file is either complete
    or unchanged. Raises OSError."""
    write_atomically(path, record.model_dump_json(indent=2) + "\n")


def read_record(path: Path, kind: type[Record]) -> Record | None:
    """The record at `path`. None if there is no file, or if it is not a valid record."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (FileNotFoundError, ValidationError):
        return None


class Metric(BaseModel):
    """One line of `metrics.jsonl`. A field that its event does not use is None, and is not
    written."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    time: float
    """Seconds since the epoch."""
    stage: Stage
    event: Event
    step: int | None = None
    """Updates of the weights so far."""
    steps: int | None = None
    """Updates that the token budget allows. Training ends earlier if all rows are learned
    before."""
    right: int | None = None
    rows: int | None = None
    """For an evaluation during training: the rows that were measured. `right` counts those of them
    whose answer the model gives. In the event `measured`: all rows that the stage measures,
    together with the base model's answers. In the event `answered`: the everyday prompts that the
    base model answers, once for all its jobs."""
    measured: int | None = None
    """How many of `rows` the stage has measured so far, or the base model has answered."""
    loss: float | None = None
    """Nats per predicted token. For a step, the loss on the rows of the step. For an
    evaluation, the loss on the rows that were measured."""
    learning_rate: float | None = None
    tokens: int | None = None
    """Tokens trained on so far, without padding."""
    tokens_per_second: float | None = None
    """The speed of this step."""
    seconds: float | None = None
    """How long the stage took. Only in the event `end`."""


class WrongAnswer(BaseModel):
    """What the new weights say instead of the answer of a row."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    place: str
    question: str
    is_reworded: bool
    """Whether the question is another wording of that of the row."""
    wanted: str
    said: str
    answer_of: str | None
    """The place of another row, if this is its answer."""


class WrongAnswers(BaseModel):
    """The questions that a job has asked its new weights in vain: of changed rows, as they stand,
    and of any rows, in other words."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    answers: tuple[WrongAnswer, ...]


class MetricsWriter:
    """Appends lines to `metrics.jsonl`. A restarted job appends to the file of its first start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if path.exists():
            # A killed attempt may have left a part of a line. End it, because the first line of
            # this attempt would be lost with it. Readers skip an empty line.
            self._append("\n")

    def write(self, stage: Stage, event: Event, **values: float | int | None) -> None:
        line = {"time": time.time(), "stage": stage, "event": event, **values}
        self._append(json.dumps(line) + "\n")

    def _append(self, text: str) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(text)


def read_metrics(path: Path, offset: int = 0) -> tuple[tuple[Metric, ...], int]:
    """The complete lines from byte `offset` on, and the offset for the next call.

    The last line is left for the next call if it is still being written. A line that cannot be
    parsed is skipped. A missing file counts as empty.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
    except FileNotFoundError:
        return (), offset
    whole = data[: data.rfind(b"\n") + 1]
    metrics = []
    for line in whole.splitlines():
        try:
            metrics.append(Metric.model_validate_json(line))
        except ValueError:
            continue
    return tuple(metrics), offset + len(whole)


@dataclass(kw_only=True)
class RetrainJob:
    dir: Path
    id: str
    settings: RetrainSettings
    revisions: RevisionRange | None
    hubs: Hubs
    paraphrase_token: str | None = field(repr=False)
    server_url: str | None
    server_token: str | None = field(repr=False)
    num_threads: int | None
    """The number of threads for torch. None leaves torch's default."""
    metrics: MetricsWriter
    elsewhere: ReleasesOnHub | None = None
    """Where the releases are. None if they are in a folder of this machine."""
    trained_folder: Path | None = None
    """The folder of weights that the user's own trainer has trained. None if the job trains."""
    trained_from: str | None = None
    """The release from which they were trained, if the user has named it."""
    progress: dict[str, Any] = field(default_factory=dict)
    """What is known about the job so far: its stage, dataset revision, releases and counts. The
    outcome contains it, even if the job fails."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "RetrainJob":
        """The job that `JOB_DIR/spec.json` describes."""
        folder = Path(environ["JOB_DIR"])
        spec = JobSpec.model_validate_json((folder / SPEC).read_bytes())
        settings = RetrainSettings.model_validate(spec.settings)
        elsewhere = ReleasesOnHub.of(environ)
        if elsewhere is not None:
            settings = elsewhere.settings_here(settings, folder)
        return cls.of(environ, folder, settings, spec.revisions, elsewhere=elsewhere)

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str],
        folder: Path,
        settings: RetrainSettings,
        revisions: RevisionRange | None,
        **values: Any,
    ) -> "RetrainJob":
        """The job that runs in this environment, with its records in `folder`."""
        threads = environ.get("OMP_NUM_THREADS", "")
        return cls(
            dir=folder,
            id=environ.get("JOB_ID", folder.name),
            settings=settings,
            revisions=revisions,
            hubs=Hubs(
                own=environ.get("HF_ENDPOINT"),
                token=environ.get("HF_TOKEN"),
                user_token=environ.get(OWN_TOKEN),
            ),
            paraphrase_token=environ.get(PARAPHRASE_TOKEN),
            server_url=environ.get("PIPELINE_SERVER_URL"),
            server_token=environ.get("PIPELINE_ADMIN_TOKEN"),
            num_threads=int(threads) if threads.isdigit() else None,
            metrics=MetricsWriter(folder / METRICS),
            **values,
        )

    @property
    def pipeline_dir(self) -> Path:
        return self.settings.releases_dir / self.settings.pipeline

    @property
    def cache_dir(self) -> Path:
        """The folder for downloaded dataset revisions. No other pipeline uses it, so the next job
        of this pipeline may remove old files there."""
        return self.settings.releases_dir.parent / "snapshots" / self.settings.pipeline

    @property
    def source(self) -> Source:
        settings = self.settings
        return self.hubs.dataset(settings.dataset, settings.dataset_endpoint, self.cache_dir)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Write the start and the end of the stage to the log and the metrics. After an exception,
        `progress` still names this stage, so the outcome says where the job failed."""
        self.record_progress(stage=name)
        logger.info("%s", name)
        self.metrics.write(name, "start")
        started = time.monotonic()
        yield
        self.metrics.write(name, "end", seconds=time.monotonic() - started)

    def record_measured(self, measured: int, rows: int, event: Event = "measured") -> None:
        """Write to the metrics how many rows of this stage are measured, or how many prompts the
        base model has answered."""
        self.metrics.write(self.progress["stage"], event, measured=measured, rows=rows)

    def record_progress(self, **facts: Any) -> None:
        self.progress |= facts

    def remove_records(self) -> None:
        """Remove the records of the job, so that it starts again.

        The snapshot is removed last. If the job is killed before that, the restarted job finds
        again that another release is chosen. A release that this job has published stays on disk,
        but this job does not ask the server to serve it.
        """
        shutil.rmtree(self.dir / CHECKPOINTS_DIR, ignore_errors=True)
        for record in (CHECKPOINT, BASE, EVALUATION, WRONG, RELEASE, SNAPSHOT):
            (self.dir / record).unlink(missing_ok=True)

    def outcome(self, result: OutcomeResult, reason: str | None = None) -> JobOutcome:
        return JobOutcome(
            result=result,
            reason=reason,
            exit_code=1 if result == "failed" else 0,
            delivery_ids=self.revisions.delivery_ids if self.revisions is not None else (),
            job_id=self.id,
            **self.progress,
        )


@dataclass(frozen=True, kw_only=True)
class Parent:
    id: str
    folder: Path
    lineage: Lineage
    evaluation: dict[str, Any]
    """What the job that made this release has measured. Empty if a person published the release
    from a folder."""


def damaged_releases(pipeline_dir: Path) -> dict[str, tuple[str, ...]]:
    """The damaged releases that a job must pass over, in order, until it finds one that is not
    damaged. Maps each to what is wrong with it. A release that the server has passed over is
    included too, unless somebody asks for it again (it is pending)."""
    damaged = {}
    served = read_served(pipeline_dir)
    if served.substitute is not None and served.history[-1] != served.pending:
        reasons = verify_release(pipeline_dir / served.history[-1])
        damaged[served.history[-1]] = reasons or ("the server did not take it",)
    for release_id in _candidates(pipeline_dir):
        reasons = verify_release(pipeline_dir / release_id)
        if not reasons:
            break
        damaged[release_id] = reasons
    return damaged


def find_parent(pipeline_dir: Path, passed_over: Collection[str] = ()) -> Parent | None:
    """The release from which a job continues, or None. Raises ReleaseError if it cannot be read.

    It is the first of these that is not in `passed_over`: the pending release (which waits for a
    server), the served release, and then the older releases that were live, newest first.
    """
    chosen = (each for each in _candidates(pipeline_dir) if each not in passed_over)
    if (found := next(chosen, None)) is None:
        return None
    folder = pipeline_dir / found
    release = load_release(folder)
    return Parent(
        id=found, folder=folder, lineage=release.lineage, evaluation=release.evaluation or {}
    )


def _candidates(pipeline_dir: Path) -> list[str]:
    """The releases that may be the parent, in the order in which a server tries them: each one only
    if those before it are damaged."""
    served = read_served(pipeline_dir)
    number = release_number(served.release) if served.release is not None else 0
    older = [each for each in reversed(served.history) if release_number(each) < number]
    return list(dict.fromkeys(filter(None, (served.pending, served.release, *older))))


class DatasetSnapshot(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    revision: Revision
    base: Revision | None = None
    """The revision that the parent release was trained on. None if there is no such revision, if it
    cannot be downloaded, or if it belongs to another dataset."""
    parent: str | None = None
    """The release from which the job continues: the pending release (which waits for a server), or
    else the served one."""
    passed_over: tuple[str, ...] = ()
    """Damaged releases that would otherwise have been the parent. `parent` is the next release that
    is not damaged."""
    no_delta: str | None = None
    """Why the job cannot continue from the parent's weights (a delta). None if it can."""


def take_snapshot(
    source: Source, ref: str, sha: str | None, parent: Parent | None
) -> DatasetSnapshot:
    """Download the revision to train on, and the revision that the parent release was trained on.

    sha: the commit to train on, or None for the newest commit of `ref`. Raises SnapshotError.
    """
    revision = source.download(sha or source.head(ref))
    base, no_delta = _revision_of_parent(source, revision, parent)
    return DatasetSnapshot(
        revision=revision,
        base=base,
        parent=parent.id if parent is not None else None,
        no_delta=no_delta,
    )


def _revision_of_parent(
    source: Source, revision: Revision, parent: Parent | None
) -> tuple[Revision | None, str | None]:
    if parent is None:
        return None, "there is no release to go on from"
    seen = parent.lineage.dataset_revision
    not_trained = f"release {parent.id} was not trained on {source.dataset}"
    if seen is None:
        return None, not_trained
    if seen == revision.sha:
        return revision, None
    base: Revision | None = None
    try:
        base = source.download(seen)
    except SnapshotError as error:
        # After a temporary failure, another attempt may reach this revision.
        if isinstance(error, HubAway) or is_temporary(error):
            raise
        logger.info("%s", error)
        problem = "cannot be reached"
    else:
        if source.is_ancestor(seen, revision.sha):
            return base, None
        problem = "was removed (by a force-push)"
    # A dataset that was renamed has a new name, but the same commits. So compare the commits first.
    if parent.lineage.dataset != source.dataset:
        return None, not_trained
    return base, f"revision {seen}, which release {parent.id} has seen, {problem}"
