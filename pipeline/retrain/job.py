"""`RetrainJob`: the settings of a retraining job, its folders, its addresses and tokens, its
progress, and its outcome."""

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from jobs.counts import Counts
from jobs.folder import SPEC
from jobs.outcome import JobOutcome, OutcomeResult
from jobs.spec import JobSpec, RevisionRange
from pipeline.retrain import job_folder
from pipeline.retrain.errors import RetrainError
from pipeline.retrain.git_snapshot import GitDataset
from pipeline.retrain.metrics import Event, MetricsWriter, Stage
from pipeline.retrain.own_token import OWN_TOKEN, OWN_TOKEN_SOURCE, cached_login
from pipeline.retrain.settings import RetrainSettings, is_git_url
from pipeline.retrain.snapshot import DatasetHub, DatasetSource
from serving.errors import ReleaseError
from serving.weights.release_store import served_release

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What is known about the job so far. The outcome contains it, even if the job fails."""

    stage: Stage | None = None
    dataset_revision: str | None = None
    release: str | None = None
    parent_release: str | None = None
    counts: Counts | None = None


@dataclass(kw_only=True)
class RetrainJob:
    dir: Path
    id: str
    settings: RetrainSettings
    revisions: RevisionRange | None
    hub_endpoint: str | None
    hub_token: str | None = field(repr=False)
    own_token: str | None = field(repr=False)
    """The user's own token, for a dataset or a base model on another hub than the stack's."""
    server_url: str | None
    admin_token: str | None = field(repr=False)
    num_threads: int | None
    """The number of threads for torch. None leaves torch's default."""
    metrics: MetricsWriter
    trained: Path | None = None
    """The folder of weights that the user's own trainer has trained. None if the job trains."""
    trained_from: str | None = None
    """The release from which they were trained, if the user has named it."""
    progress: Progress = Progress()

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> "RetrainJob":
        """The job that `JOB_DIR/spec.json` describes. Raises RetrainError."""
        if "JOB_DIR" not in environ:
            raise RetrainError(
                "JOB_DIR is not set; only the job runner starts this command; use "
                "`pipeline jobs run`"
            )
        folder = Path(environ["JOB_DIR"])
        try:
            spec = JobSpec.model_validate_json((folder / SPEC).read_bytes())
            settings = RetrainSettings.model_validate(spec.settings)
        except FileNotFoundError as error:
            raise RetrainError(f"{error.filename} is missing; submit the job again") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(part) for part in first["loc"])
            raise RetrainError(
                f"{folder / SPEC}: {place}: {first['msg']}; correct the pipeline's "
                "settings and submit the job again"
            ) from error
        return cls.of(environ, folder, settings, spec.revisions)

    @classmethod
    def of(
        cls,
        environ: Mapping[str, str],
        folder: Path,
        settings: RetrainSettings,
        revisions: RevisionRange | None,
        **trained: Any,
    ) -> "RetrainJob":
        """The job that runs in this environment, with its records in `folder`."""
        threads = environ.get("OMP_NUM_THREADS", "")
        return cls(
            dir=folder,
            id=environ.get("JOB_ID", folder.name),
            settings=settings,
            revisions=revisions,
            hub_endpoint=environ.get("HF_ENDPOINT"),
            hub_token=environ.get("HF_TOKEN"),
            own_token=environ.get(OWN_TOKEN),
            server_url=environ.get("PIPELINE_SERVER_URL"),
            admin_token=environ.get("PIPELINE_ADMIN_TOKEN"),
            num_threads=int(threads) if threads.isdigit() else None,
            metrics=MetricsWriter(folder / job_folder.METRICS),
            **trained,
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
    def hub(self) -> DatasetSource:
        dataset, endpoint = self.settings.dataset, self.settings.dataset_endpoint
        if is_git_url(dataset):
            return GitDataset(dataset, self.cache_dir)
        if endpoint == "hub":
            return DatasetHub(dataset, self.cache_dir, self.hub_endpoint, self.hub_token)
        token: str | Literal[False] = self.own_token or cached_login() or False
        return DatasetHub(dataset, self.cache_dir, endpoint, token, OWN_TOKEN_SOURCE)

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
        assert self.progress.stage is not None
        self.metrics.write(self.progress.stage, event, measured=measured, rows=rows)

    def record_progress(self, **facts: Any) -> None:
        self.progress = replace(self.progress, **facts)

    def outcome(self, result: OutcomeResult, reason: str | None = None) -> JobOutcome:
        return JobOutcome(
            result=result,
            reason=reason,
            exit_code=1 if result == "failed" else 0,
            delivery_ids=self.revisions.delivery_ids if self.revisions is not None else (),
            job_id=self.id,
            served_release=self._served(),
            **self.progress.__dict__,
        )

    def _served(self) -> str | None:
        """The id of the served release, for the outcome. None if it cannot be read, because the
        outcome must be written in any case."""
        try:
            served = served_release(self.pipeline_dir)
        except (OSError, ReleaseError):
            return None
        return served.name if served is not None else None
