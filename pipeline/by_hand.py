"""Jobs that a person starts: with the stack up, or with what a job needs started for it alone."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.record import Job
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.after_jobs import after_jobs
from pipeline.errors import PipelineError
from pipeline.job_store import check_schemas, open_job_store
from pipeline.journal import NUM_WATCHED
from pipeline.logs import log_to_stderr
from pipeline.paths import Home
from pipeline.retrain.git_snapshot import GitDataset
from pipeline.retrain.settings import is_git_url
from pipeline.rules import retrain_rule
from pipeline.services import RUNNER, hub_service
from pipeline.settings import PipelineSettings, Settings, load_settings, settings_file
from pipeline.stack import Stack, read_stack
from pipeline.tokens import Tokens, load_tokens
from receiver.payload import Event, ObjectId, Repo, UpdatedRef, Url, Webhook, WebhookPayload

PRELOAD = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "datasets",
    "huggingface_hub",
    "pipeline.retrain.run",
    "pipeline.retrain.start",
)
"""What a retraining imports: seconds that every job would otherwise begin with."""


@contextmanager
def with_runner(home: Home, settings: Settings, *, detach: bool) -> Iterator[str]:
    """A hub and a runner for one job; yields the hub's URL.

    With a stack up, those are the stack's. Otherwise a hub on a free port and a runner are started,
    and ended with the context; detached ones end by themselves once no job is left.
    """
    record = read_stack(home)
    if record is not None:
        # A detached runner has its hub on a port of its own.
        urls = [child.url for child in record.children if child.name == "hub" and child.url]
        yield urls[0] if urls else settings.hub_url
        return
    check_schemas(settings, home)
    # Children read the port from the environment, as this process does from here on.
    os.environ["PIPELINE_HUB__PORT"] = str(_free_port())
    os.environ["PIPELINE_JOBS__METRICS_PORT"] = "0"
    settings = load_settings()
    hub = hub_service(settings)
    stack = Stack(home, [hub] if detach else [hub, RUNNER])
    stack.start()
    try:
        yield settings.hub_url
        if not detach:
            _wait_until_idle(home, settings)
    finally:
        stack.stop()
    if detach:
        # Only now: a runner that ends when idle must find the job that it was started for.
        subprocess.Popen(
            [sys.executable, "-m", "pipeline", "jobs", "runner", "--with-hub", "--until-idle"],
            stdin=subprocess.DEVNULL,
            stdout=home.log_file("runner").open("ab"),
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def submit(
    store: JobStore,
    home: Home,
    settings: Settings,
    *,
    hub_url: str,
    pipeline: PipelineSettings,
    revision: str | None = None,
    payload: dict[str, Any] | None = None,
    force_reason: str | None = None,
    command: tuple[str, ...] = (),
) -> Job:
    """Make the retraining of one commit pending, or `command` in the same environment.

    The commit is `revision`, else what `payload` says, else the head of the pipeline's ref. Raises
    PipelineError for an unknown commit or a payload that is none, PendingJob where a job waits.
    """
    rule = retrain_rule(settings, home, pipeline, force_reason=force_reason)
    sha = revision or (_pushed(payload, rule.ref) if payload is not None else None)
    sha = _resolve(hub_url, load_tokens(home.tokens_file).hub, pipeline, sha)
    revisions = RevisionRange(repo=pipeline.dataset, ref=rule.ref, new_sha=sha)
    if payload is None:
        payload = _payload(hub_url, pipeline, revisions).model_dump(mode="json", exclude_none=True)
    if command:
        return store.submit(JobSpec(command=command, env=rule.env), payload=payload).job
    # No dedupe key: who asks by hand for a commit that was trained on already wants it again.
    spec = rule.job_spec(revisions).model_copy(update={"dedupe_key": None})
    return store.submit(spec, payload=payload, joins=False).job


def submit_bare(store: JobStore, command: tuple[str, ...]) -> Job:
    """Make a command pending where there is no commit yet that its environment could name."""
    return store.submit(JobSpec(command=command)).job


def run_jobs(home: Home, *, until_idle: bool, with_hub: bool) -> None:
    """Be the runner of this state folder until SIGTERM, or until no job is left."""
    from jobs.runner import Runner

    settings = load_settings()
    log_to_stderr(settings.logs, "runner")
    tokens = load_tokens(home.tokens_file)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stack = Stack(home, [hub_service(settings)]) if with_hub else None
    if stack is not None:
        stack.start()
    try:
        with (
            open_job_store(settings, home) as store,
            after_jobs(settings, home, serves_metrics=not (with_hub or until_idle)),
        ):
            runner = Runner(
                store,
                home.jobs_dir,
                _with_preload(settings.jobs),
                {
                    **os.environ,
                    **_own_token(tokens),
                    "HF_ENDPOINT": settings.hub_url,
                    "HF_TOKEN": tokens.hub,
                    "PIPELINE_HOME": str(home.root),
                    "PIPELINE_SETTINGS": str(settings_file()),
                    "PIPELINE_ADMIN_TOKEN": tokens.admin,
                    "WEBHOOK_SECRET": tokens.webhook,
                },
                secret_key=tokens.key.encode(),
            )
            if until_idle:
                runner.run_until_idle(stop)
            else:
                runner.run(stop)
    finally:
        if stack is not None:
            stack.stop()


def _own_token(tokens: Tokens) -> dict[str, str]:
    """The user's token for hubs elsewhere, where there is one; never the stack's own."""
    token = os.environ.get("HF_TOKEN")
    return {"BASE_MODEL_HF_TOKEN": token} if token and token != tokens.hub else {}


def _with_preload(settings: JobsSettings) -> JobsSettings:
    if settings.preload is not None:
        return settings
    return settings.model_copy(update={"preload": PRELOAD})


def _wait_until_idle(home: Home, settings: Settings) -> None:
    """Others may have found this runner, and count on it for jobs of their own."""
    with open_job_store(settings, home) as store:
        while any(not job.has_ended for job in store.list(limit=NUM_WATCHED)):
            time.sleep(0.1)


def _pushed(payload: dict[str, Any], ref: str) -> str | None:
    """The commit that a payload tells of for this ref."""
    try:
        told = WebhookPayload.model_validate(payload)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3]
        )
        raise PipelineError(f"the payload is no webhook payload: {faults}") from None
    return next((each.newSha for each in told.updatedRefs or () if each.ref == ref), None)


def _resolve(hub_url: str, token: str, pipeline: PipelineSettings, revision: str | None) -> str:
    import httpx2  # what the hub's client raises for a connection that fails
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    wanted = revision or pipeline.ref
    if is_git_url(pipeline.dataset):
        if revision is not None:
            return revision
        ref = pipeline.ref if pipeline.ref.startswith("refs/") else f"refs/heads/{pipeline.ref}"
        return GitDataset(pipeline.dataset, Path(os.devnull)).head(ref)
    try:
        info = HfApi(endpoint=hub_url, token=token).dataset_info(pipeline.dataset, revision=wanted)
    except RevisionNotFoundError:
        what = (
            f"has no commit {revision!r}; push it, or leave --revision out for the head"
            if revision is not None
            else f"has no commit on {pipeline.ref} yet; push one"
        )
        raise PipelineError(f"dataset {pipeline.dataset} {what}") from None
    except RepositoryNotFoundError:
        raise PipelineError(
            f"there is no dataset {pipeline.dataset} on {hub_url}; `pipeline up` creates it"
        ) from None
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise PipelineError(
            f"{hub_url} did not tell the head of {pipeline.dataset}: {error}"
        ) from error
    if info.sha is None:
        raise PipelineError(f"dataset {pipeline.dataset} is empty; push a commit to it first")
    return info.sha


def _payload(hub_url: str, pipeline: PipelineSettings, revisions: RevisionRange) -> WebhookPayload:
    """What the hub would have sent for this commit, so that a job's environment is always whole."""
    if is_git_url(pipeline.dataset):
        owner, url, api = pipeline.dataset, pipeline.dataset, None
    else:
        owner = pipeline.dataset.partition("/")[0]
        url = f"{hub_url}/datasets/{pipeline.dataset}"
        api = f"{hub_url}/api/datasets/{pipeline.dataset}"
    return WebhookPayload(
        event=Event(action="update", scope="repo.content"),
        repo=Repo(
            type="dataset",
            name=pipeline.dataset,
            id=pipeline.dataset,
            private=True,
            owner=ObjectId(id=owner),
            url=Url(web=url, api=api),
            headSha=revisions.new_sha,
        ),
        webhook=Webhook(id="by-hand", version=3),
        updatedRefs=(UpdatedRef(ref=revisions.ref, newSha=revisions.new_sha),),
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
