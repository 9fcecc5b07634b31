"""What is known of a stack, of its state folder and of its jobs, and how it is said in one line.
`pipeline status` shows these facts, and `pipeline doctor` judges them. Asking for facts changes
nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from jobs.counts import Counts
from jobs.errors import HeadAway, NoHead
from jobs.job import Job
from jobs.outcome import JobOutcome
from jobs.process import is_alive
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.job import PROMOTION_DIR, WRONG, Metric, WrongAnswers, read_record
from pipeline.runner.job_store import reading_jobs
from pipeline.runner.submit import ask_head, source_of
from pipeline.settings import PipelineSettings, Settings
from pipeline.stack.record import Child, StackRecord, read_stack
from pipeline.stack.services import health, server_state
from pipeline.tokens import Tokens, read_tokens
from receiver.webhooks import WebhookRecord, list_webhooks
from serving.engines.settings import EngineChoice, choose_engine
from serving.errors import ReleaseError
from serving.weights.release_store import (
    load_release,
    served_or_empty,
    served_release,
    stood_in_for,
)

READ_IT = "do what the message says"
NUM_JOBS = 20
"""How many of the newest jobs of a pipeline are looked at."""
NUM_WATCHED = 100
"""`news` looks at only this many of the newest jobs. This is enough, because an older job has
almost always ended, and the state of an ended job does not change."""
WAYS_ON = (
    "push a correction; or accept the rows as they are with: pipeline jobs run --force --reason WHY"
)
"""What the user can do after the gate has rejected a job."""
DECIDED_NOTHING = frozenset({"failed", "cancelled", "superseded"})
"""Results of jobs after which the rows of an earlier rejected job still wait for the next job."""


class Finding(BaseModel):
    """A fault that a check of `pipeline doctor` found."""

    model_config = ConfigDict(frozen=True)

    check: str
    """What was checked, in one or two words, such as `git` or `webhook`."""
    message: str
    next_step: str
    """What the user can do about the fault."""

    def __str__(self) -> str:
        is_said = self.next_step == READ_IT or self.next_step in self.message
        return f"{self.check}: {self.message}{'' if is_said else f'; {self.next_step}'}"


def wrong(check: str, message: str, next_step: str) -> Finding:
    return Finding(check=check, message=message, next_step=next_step)


class Facts:
    """Each fact is asked for once, when it is first needed."""

    def __init__(self, home: Home, settings: Settings) -> None:
        self.home = home
        self.settings = settings

    @cached_property
    def stack(self) -> StackRecord | None:
        return read_stack(self.home)

    @cached_property
    def engine(self) -> EngineChoice:
        return choose_engine(self.settings.serving.engine)

    @cached_property
    def tokens(self) -> Tokens | None:
        """None if they cannot be read."""
        try:
            return read_tokens(self.home.tokens_file)
        except PipelineError:
            return None

    @cached_property
    def answering_hub(self) -> Tokens | None:
        """The tokens for the stack's own hub. None if no stack is up, or if the hub does not
        answer."""
        is_up = self.stack is not None and health(self.settings.hub_url) is not None
        return self.tokens if is_up else None

    @cached_property
    def webhooks(self) -> tuple[WebhookRecord, ...]:
        """The webhooks of the stack's own hub. Raises ReceiverError."""
        if (tokens := self.answering_hub) is None:
            return ()
        return tuple(list_webhooks(endpoint=self.settings.hub_url, token=tokens.hub))

    @cached_property
    def jobs(self) -> dict[str, list[Job]]:
        """Pipeline → its newest jobs, newest first. Raises StoreError."""
        with reading_jobs(self.settings, self.home) as store:
            names = [each.name for each in self.settings.pipelines]
            return {name: store.list(pipeline=name, limit=NUM_JOBS) for name in names}

    @cached_property
    def paused(self) -> dict[str, float]:
        """Paused pipeline → since when (Unix time). Raises StoreError."""
        with reading_jobs(self.settings, self.home) as store:
            return store.paused()

    def newest_commit(self, pipeline: PipelineSettings) -> str | None:
        """None if no stack is up, if the dataset is not on the stack's own hub, or if the branch
        has no commit."""
        tokens, url = self.answering_hub, self.settings.hub_url
        if tokens is None or not self.settings.is_on_own_hub(pipeline):
            return None
        with suppress(HeadAway, NoHead):
            return ask_head(source_of(pipeline.dataset, None, url, tokens.hub), pipeline.ref)
        return None

    def followers(self, pipeline: PipelineSettings) -> list[dict[str, Any]]:
        """What the servers report that follow the pipeline's releases on the stack's own hub. Empty
        if no stack is up, or if the hub does not have the repository yet."""
        if (tokens := self.answering_hub) is None:
            return []
        repository = f"{self.settings.hub.owner}/{pipeline.name}"
        url = f"{self.settings.hub_url}/api/models/{repository}/followers"
        with suppress(httpx.HTTPError):
            bearer = {"Authorization": f"Bearer {tokens.hub}"}
            answer = httpx.get(url, headers=bearer, timeout=5, trust_env=False, verify=False)
            if answer.is_success:
                return [dict(each) for each in answer.json()]
        return []

    def releases_dir(self, pipeline: PipelineSettings) -> Path:
        return self.home.releases_dir / pipeline.name

    def served(self, pipeline: PipelineSettings) -> dict[str, Any] | None:
        """The release that the server reports as served. If no server reports one, the release that
        was served last. None if no release was served yet."""
        folder, url = self.releases_dir(pipeline), self.settings.server_url(pipeline)
        answer = server_state(url)
        served: dict[str, Any] = {
            "release": answer.get("release"),
            "is_live": answer.get("release") is not None,
            "dataset_revision": answer.get("dataset_revision"),
            "stands_in_for": answer.get("stands_in_for"),
            "reason": answer.get("reason"),  # why this damaged release could not be served
            "unreadable": None,  # why the manifest of the release cannot be read
            "url": url,
        }
        if served["is_live"]:
            return served
        try:
            if (last := served_release(folder)) is None:
                return None
            served["release"] = last.name
            # Only if no server answers. A server that serves no release serves no substitute.
            if not answer:
                served["stands_in_for"] = stood_in_for(folder)
            served["dataset_revision"] = load_release(last).lineage.dataset_revision
        except ReleaseError as error:
            served |= {"release": served["release"] or "current", "unreadable": str(error)}
        return served

    def of_pipeline(self, pipeline: PipelineSettings, now: float) -> dict[str, Any]:
        """What `pipeline status --json` says of a pipeline."""
        jobs, head = self.jobs[pipeline.name], self.newest_commit(pipeline)
        served = self.served(pipeline)
        lines = [{"id": job.id, "state": job.state, "line": describe(job)} for job in jobs]
        ended = [line for job, line in zip(jobs, lines, strict=True) if job.has_ended]
        return {
            "name": pipeline.name,
            "dataset": pipeline.dataset,
            "ref": pipeline.ref,
            "dataset_head": head,
            "served": served,
            "followers": self.followers(pipeline),
            "pending_release": served_or_empty(self.releases_dir(pipeline)).pending,
            "queue_age_seconds": max(
                (round(now - job.created_at, 1) for job in jobs if not job.has_ended),
                default=None,
            ),
            "queue": [line for line in lines if line not in ended],
            "last_job": next(iter(ended), None),
            "paused_since": self.paused.get(pipeline.name),
            "refused": advice_after_refusal(jobs),
        }


def state_of(child: Child) -> Literal["up", "hung", "down"]:
    """The state of a service. `hung`: its process runs, but does not answer."""
    if child.process is None or not is_alive(child.process):
        return "down"
    return "hung" if child.is_silent else "up"


# What is said of jobs


class Journal:
    """Finds the jobs whose state has changed since the last call of `news`, or since this object
    was created."""

    def __init__(self, store: JobStore) -> None:
        self._store = store
        self._has_news = True
        self._seen = {job.id: job.state for job in store.list(limit=NUM_WATCHED)}

    def news(self) -> list[str]:
        """One line for each job whose state has changed. The line of the oldest job comes first.

        Raises StoreError. The next call then returns the lines that this call could not return.
        """
        self._has_news |= self._store.has_changed()
        if not self._has_news:
            return []
        lines = []
        for job in reversed(self._store.list(limit=NUM_WATCHED)):
            if self._seen.get(job.id) != job.state:
                self._seen[job.id] = job.state
                lines.append(describe(job))
        self._has_news = False
        return lines


def subject(job: Job) -> str:
    """What the job is about. If the job is for a commit, this is the dataset and the commit.
    Otherwise, this is the job's command."""
    revisions = job.spec.revisions
    if revisions is None:
        return " ".join(job.spec.command)
    if revisions.new_sha is None:  # the job gets the head of this ref when it starts
        return f"{revisions.repo}@{revisions.ref.removeprefix('refs/heads/')}"
    return f"{revisions.repo}@{revisions.new_sha[:8]}"


def describe(job: Job) -> str:
    """One line: the job's id, what the job is about, and its state or outcome."""
    if job.outcome is None:
        waits = f", waits: {job.waits_for}" if job.waits_for else ""
        return f"{job.id}  {subject(job)}  {job.state.lower()}{waits}"
    outcome = job.outcome
    counts = "" if outcome.counts is None else str(outcome.counts)
    parts = [job.id, subject(job), outcome.result, outcome.release, counts, outcome.reason]
    return "  ".join(part for part in parts if part)


def counts_text(evaluation: Any) -> str:
    """The counts in a release's `evaluation`, as one line. Empty if the release has no evaluation
    (for example after `releases publish`), if no row was counted, or if they cannot be read."""
    with suppress(ValidationError):
        return str(Counts.model_validate((evaluation or {}).get("counts") or {}))
    return ""


def how_far(metric: Metric) -> str | None:
    """How far the stage is, by this line of the job's metrics; None if the line does not say it."""
    if metric.event == "step" and metric.loss is not None:
        return f"step {metric.step} of at most {metric.steps}, loss {metric.loss:.3f}"
    if metric.event == "measured":
        return f"{metric.measured or 0} of {metric.rows} rows"
    if metric.event == "answered":
        return f"the base model answers: {metric.measured or 0} of {metric.rows} prompts"
    return None


def wrong_answers(job_dir: Path) -> WrongAnswers | None:
    """What the job's new weights say instead of the answers of rows. None if the job has asked no
    model. job_dir: the job's folder."""
    folders = (job_dir, job_dir / PROMOTION_DIR)
    return next(filter(None, (read_record(each / WRONG, WrongAnswers) for each in folders)), None)


def advice_after_refusal(jobs: Sequence[Job]) -> str | None:
    """What the user can do if the gate (the checks of the new rows and of the new weights) rejected
    the last job that ended. None if the gate did not reject this job. Jobs that failed, were
    cancelled or were superseded are passed over, because the rejected rows wait after them too.

    jobs: the newest jobs of a pipeline, newest first.
    """
    outcomes = (job.outcome for job in jobs if job.has_ended)
    last = next((each for each in outcomes if _has_decided(each)), None)
    if last is None or last.result != "rejected":
        return None
    revision = (last.dataset_revision or "unknown")[:12]
    return (
        f"the gate rejected {revision}, and the job of the next commit trains on the rows of "
        f"{revision} again; {next_step(jobs, WAYS_ON)}"
    )


def next_step(jobs: Sequence[Job], step: str) -> str:
    """`step`, what to do after the last job that ended. But if another job waits or runs, to wait
    for that: it may already train on a correction. jobs: of a pipeline, newest first."""
    current = next((job for job in jobs if not job.has_ended), None)
    if current is None:
        return step
    state = "running" if current.state == "RUNNING" else "pending"
    return f"wait for job {current.id}, which is {state}: pipeline jobs wait {current.id}"


def _has_decided(outcome: JobOutcome | None) -> bool:
    # A job that ended in the stage `claim` only repeats the decision of an earlier job.
    return outcome is None or not (outcome.stage == "claim" or outcome.result in DECIDED_NOTHING)
