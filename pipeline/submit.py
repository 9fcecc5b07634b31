"""Submits a job that a person asks for. The job either retrains the model on a commit, or runs a
command."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from jobs.job import Job
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.git_snapshot import GitDataset
from pipeline.retrain.own_token import own_token
from pipeline.retrain.settings import SkipIf, is_git_url
from pipeline.rules import branch_ref, retrain_rule
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import load_tokens
from receiver.payload import (
    Event,
    ObjectId,
    Repo,
    UpdatedRef,
    Url,
    WebhookPayload,
    WebhookReference,
)


def submit_retraining(
    store: JobStore,
    home: Home,
    settings: Settings,
    *,
    hub_url: str,
    pipeline: PipelineSettings,
    revision: str | None = None,
    payload: dict[str, Any] | None = None,
    force_reason: str | None = None,
    skip_if: SkipIf = "nothing_changed",
) -> Job:
    """Submit the retraining of one commit. The job starts as soon as no other job of the pipeline
    runs.

    The job retrains on the commit `revision`. If `revision` is None, the job retrains on the commit
    that `payload` names for the branch that the pipeline follows. If `payload` is None or names no
    commit for this branch, the job retrains on the newest commit of the branch.

    `hub_url` is the URL of the stack's own hub. `RetrainSettings` explains `force_reason` and
    `skip_if`.

    Raises PipelineError for an unknown commit or an invalid payload, or if the hub (or the git
    server) cannot be reached. If the dataset is a git URL, this function does not check whether the
    commit `revision` exists; if it does not exist, the job fails. Raises PendingJob if the pipeline
    already has a pending job that was submitted by hand.
    """
    rule = retrain_rule(settings, home, pipeline, force_reason=force_reason, skip_if=skip_if)
    sha = revision or (_pushed_commit(payload, rule.ref) if payload is not None else None)
    hub = _hub_of(hub_url, home, settings, pipeline)
    sha = _resolve(hub, pipeline, sha)
    revisions = RevisionRange(repo=pipeline.dataset, ref=rule.ref, new_sha=sha)
    if payload is None:
        payload = _push_payload(hub.url, pipeline, revisions)
    # Set no `dedupe_key`: with the key, a later push of this commit would start no job.
    # Set `debounce_seconds` to 0: the job need not wait for later commits, because the store never
    # merges later commits into a job that was submitted by hand.
    by_hand = {"dedupe_key": None, "debounce_seconds": 0.0}
    spec = rule.job_spec(revisions).model_copy(update=by_hand)
    return store.submit(spec, payload=payload, by_hand=True).job


def submit_command(
    store: JobStore,
    home: Home,
    settings: Settings,
    *,
    hub_url: str,
    pipeline: PipelineSettings | None,
    revision: str | None = None,
    payload: dict[str, Any] | None = None,
    command: tuple[str, ...],
) -> Job:
    """Submit a command. If `pipeline` is not None, the command gets the environment variables of
    the pipeline's jobs.

    If there is a `pipeline` but no `payload`, the command gets a payload that this function makes:
    the payload that the hub would send for a push of the commit `revision`. If `revision` is None,
    the payload is for the newest commit of the pipeline's branch. If the hub cannot name the newest
    commit, for example because the branch has no commit yet, the command gets no payload. Do not
    pass both `payload` and `revision`.

    Raises PipelineError for an unknown `revision`, or if the hub cannot be asked for a `revision`.
    If the dataset is a git URL, this function does not check whether the commit `revision`
    exists.
    """
    env = {}
    if pipeline is not None:
        env = retrain_rule(settings, home, pipeline).env
        if payload is None:
            hub = _hub_of(hub_url, home, settings, pipeline)
            try:
                sha = _resolve(hub, pipeline, revision)
            except PipelineError:
                if revision is not None:
                    raise
            else:
                revisions = RevisionRange(
                    repo=pipeline.dataset, ref=branch_ref(pipeline), new_sha=sha
                )
                payload = _push_payload(hub.url, pipeline, revisions)
    spec = JobSpec(command=command, env=env)
    return store.submit(spec, payload=payload, by_hand=True).job


def _pushed_commit(payload: dict[str, Any], ref: str) -> str | None:
    """The commit that the payload names for this ref; None if the payload names no such commit."""
    try:
        webhook = WebhookPayload.model_validate(payload)
    except ValidationError as error:
        faults = "; ".join(
            f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:3]
        )
        raise PipelineError(f"--payload is not a webhook payload: {faults}") from None
    return next((each.newSha for each in webhook.updatedRefs or () if each.ref == ref), None)


@dataclass(frozen=True, kw_only=True)
class _Hub:
    """The hub that has a pipeline's dataset."""

    url: str
    token: str | Literal[False] = field(repr=False)
    """False if the user has no token for this hub."""
    if_missing: str
    """The end of the error message for a missing dataset. It says what the user can do."""


def _hub_of(hub_url: str, home: Home, settings: Settings, pipeline: PipelineSettings) -> _Hub:
    token = load_tokens(home.tokens_file).hub
    other = settings.other_hub(pipeline)
    if other is None:
        return _Hub(url=hub_url, token=token, if_missing="`pipeline up` creates it")
    return _Hub(
        url=other,
        token=own_token(os.environ, token) or False,
        if_missing="or your token may not read it: set HF_TOKEN, or run `hf auth login`",
    )


def _resolve(hub: _Hub, pipeline: PipelineSettings, revision: str | None) -> str:
    import httpx2  # huggingface_hub raises the errors of httpx2 when a connection fails
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
        return GitDataset(pipeline.dataset, Path(os.devnull)).head(branch_ref(pipeline))
    try:
        info = HfApi(endpoint=hub.url, token=hub.token).dataset_info(
            pipeline.dataset, revision=wanted
        )
    except RevisionNotFoundError:
        what = (
            f"has no commit {revision!r}; push this commit, or leave --revision out to train on "
            "the newest one"
            if revision is not None
            else f"has no commit on {pipeline.ref} yet; push one"
        )
        raise PipelineError(f"dataset {pipeline.dataset} {what}") from None
    except RepositoryNotFoundError:
        raise PipelineError(
            f"there is no dataset {pipeline.dataset} on {hub.url}; {hub.if_missing}"
        ) from None
    except (HfHubHTTPError, httpx2.HTTPError) as error:
        raise PipelineError(
            f"could not ask the hub at {hub.url} for {pipeline.dataset}@{wanted}: {error}; check "
            "that this hub is up"
        ) from error
    if info.sha is None:
        raise PipelineError(f"dataset {pipeline.dataset} is empty; push a commit to it first")
    return info.sha


def _push_payload(
    hub_url: str, pipeline: PipelineSettings, revisions: RevisionRange
) -> dict[str, Any]:
    """The payload that the hub would send for a push of this commit. The job gets its `WEBHOOK_…`
    variables from this payload. So the job has the same variables as a job that a push started,
    except `WEBHOOK_SECRET`."""
    if is_git_url(pipeline.dataset):
        owner, url, api = pipeline.dataset, pipeline.dataset, None
    else:
        owner = pipeline.dataset.partition("/")[0]
        url = f"{hub_url}/datasets/{pipeline.dataset}"
        api = f"{hub_url}/api/datasets/{pipeline.dataset}"
    payload = WebhookPayload(
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
        webhook=WebhookReference(id="by-hand", version=3),
        updatedRefs=(UpdatedRef(ref=revisions.ref, newSha=revisions.new_sha),),
    )
    return payload.model_dump(mode="json", exclude_none=True)
