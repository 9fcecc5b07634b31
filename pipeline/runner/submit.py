"""Makes jobs from the settings of a pipeline: the rules (`RetrainRule`) by which the receiver makes
a job from a push, and the jobs that a person asks for. Such a job either retrains the model on a
commit, or runs a command.

The head (the newest commit) of the ref that a pipeline follows is read from the API of the hub that
has the dataset, or with `git ls-remote`.
"""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from jobs.errors import HeadAway, NoHead
from jobs.job import FindHead, Head, Job
from jobs.spec import DEFAULT_BRANCH, LOCAL, JobSpec, RevisionRange, full_ref
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.errors import HubAway, SnapshotError
from pipeline.retrain.settings import RetrainSettings, SkipIf
from pipeline.retrain.sources import DatasetHub, GitDataset, Hubs, Source
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import Tokens, load_tokens
from receiver.payload import WebhookPayload
from receiver.retrain import RetrainRule
from serving.weights.release import faults_in

logger = logging.getLogger(__name__)

RETRAINING = "pipeline.retrain"
"""The Python module that the command of the built-in retraining runs."""
ASK_SECONDS = 5.0
"""How long to wait for an answer. The runner does nothing else meanwhile."""


def source_of(
    dataset: str, other_hub: str | None, hub_url: str, token: str, cache_dir: Path | None = None
) -> Source:
    """The dataset on the hub `other_hub` or, if that is None, on the stack's own hub, which has the
    URL `hub_url` and the token `token`. cache_dir: the folder for downloads, if there are any."""
    hubs = Hubs.of_shell(hub_url, token)
    return hubs.dataset(dataset, other_hub or "hub", cache_dir or Path(os.devnull))


def source_of_job(job: Job, hub_url: str, tokens: Tokens, cache_dir: Path | None = None) -> Source:
    """The dataset of a job with a range of commits. `hub_url` is the URL of the stack's own hub."""
    assert job.spec.revisions is not None
    other_hub = job.spec.env.get("DATASET_ENDPOINT")
    return source_of(job.spec.revisions.repo, other_hub, hub_url, tokens.hub, cache_dir)


def ask_head(source: Source, ref: str) -> str:
    """The commit that `ref` points to. Raises HeadAway, or NoHead if there is no such ref."""
    try:
        return source.head(ref, ASK_SECONDS)
    except HubAway as error:
        raise HeadAway(str(error)) from error
    except SnapshotError as error:
        raise NoHead(str(error)) from error


def _commit(source: Source, revision: str) -> str:
    """The full id of the commit `revision`. For a git URL, this is `revision` itself, without a
    check. Raises the errors of `ask_head`."""
    return revision if isinstance(source, GitDataset) else ask_head(source, revision)


def push_payload(
    source: Source, revisions: RevisionRange, delivered: dict[str, Any] | None, webhook: str
) -> dict[str, Any]:
    """The payload that the hub would send for a push of `revisions`. What does not depend on the
    commit comes from the payload that a hub has `delivered`; without one, the payload names
    `webhook` as its webhook."""
    delivered, name = delivered or {}, source.dataset
    owner, url = name, {"web": name}
    if isinstance(source, DatasetHub):
        place, owner = f"datasets/{name}", name.partition("/")[0]
        url = {"web": f"{source.endpoint}/{place}", "api": f"{source.endpoint}/api/{place}"}
    made = {"type": "dataset", "name": name, "id": name, "private": True}
    repo = delivered.get("repo") or {**made, "owner": {"id": owner}, "url": url}
    if revisions.ref == DEFAULT_BRANCH:
        repo = repo | {"headSha": revisions.new_sha}
    return {
        "event": {"action": "update", "scope": "repo.content"},
        "repo": repo,
        "webhook": delivered.get("webhook") or {"id": webhook, "version": 3},
        "updatedRefs": [
            {"ref": revisions.ref, "oldSha": revisions.old_sha, "newSha": revisions.new_sha}
        ],
    }


def _push(source: Source, ref: str, sha: str) -> tuple[RevisionRange, dict[str, Any]]:
    """The range of a job by hand for this commit, and the payload that the hub would send."""
    revisions = RevisionRange(repo=source.dataset, ref=ref, new_sha=sha)
    return revisions, push_payload(source, revisions, None, "by-hand")


def head_finder(hub_url: str, tokens: Tokens) -> FindHead:
    """The function that reads heads for the job store (`JobStore.claim`)."""

    def find_head(job: Job) -> Head:
        assert job.spec.revisions is not None
        source = source_of_job(job, hub_url, tokens)
        try:
            sha = ask_head(source, job.spec.revisions.ref)
        except HeadAway as away:
            if str(away) != job.waits_for:
                logger.warning("Job %s waits: %s", job.id, away, extra={"job_id": job.id})
            raise
        revisions = job.spec.revisions.model_copy(update={"new_sha": sha})
        webhook = "by-hand" if job.by_hand else "retrain"
        return Head(sha=sha, payload=push_payload(source, revisions, job.payload, webhook))

    return find_head


def retrain_rules(settings: Settings, home: Home) -> tuple[RetrainRule, ...]:
    return tuple(retrain_rule(settings, home, pipeline) for pipeline in settings.pipelines)


def retrain_rule(
    settings: Settings,
    home: Home,
    pipeline: PipelineSettings,
    *,
    force_reason: str | None = None,
    skip_if: SkipIf = "no_row_changed",
) -> RetrainRule:
    """The rule of one pipeline. If the settings change later, this rule does not change.

    Pass `force_reason` and `skip_if` only for a job that a person submits by hand.
    `RetrainSettings` (`pipeline/retrain/settings.py`) explains both arguments.
    """
    ref, other_hub = full_ref(pipeline.ref), settings.other_hub(pipeline)
    retrain = RetrainSettings(
        pipeline=pipeline.name,
        dataset=pipeline.dataset,
        dataset_endpoint=other_hub or "hub",
        ref=ref,
        base_model=str(pipeline.base_folder() or pipeline.base_model),
        base_model_endpoint=pipeline.base_model_endpoint,
        releases_dir=home.releases_dir,
        bases_dir=home.bases_dir,
        keep=pipeline.keep,
        data=pipeline.data,
        train=pipeline.train,
        gate=pipeline.gate,
        paraphrase=pipeline.paraphrase,
        force_reason=force_reason,
        skip_if=skip_if,
    )
    spec = JobSpec(
        command=pipeline.command or _retraining(pipeline),
        pipeline=pipeline.name,
        launcher=pipeline.launcher,
        resources=pipeline.resources,
        debounce_seconds=pipeline.debounce_seconds,
        max_wait_seconds=pipeline.max_wait_seconds,
        settings=retrain.model_dump(mode="json"),
        env={
            "PIPELINE_NAME": pipeline.name,
            "PIPELINE_SERVER_URL": settings.server_url(pipeline),
            # The hub that has the dataset. The user's own trainer cannot use HF_ENDPOINT for this:
            # HF_ENDPOINT is always the stack's own hub. If the dataset is on the stack's own hub,
            # the runner sets the variable, because only the runner knows the hub's present port.
            **({"DATASET_ENDPOINT": other_hub} if other_hub is not None else {}),
        },
    )
    return RetrainRule(spec=spec, dataset=pipeline.dataset, endpoint=other_hub, ref=ref)


def _retraining(pipeline: PipelineSettings) -> tuple[str, ...]:
    """The command of the built-in retraining: `pipeline/retrain/__main__.py`."""
    # Elsewhere, it is the Python of the agent: see `jobs/agent.py`.
    python = sys.executable if pipeline.launcher == LOCAL else "python"
    nodes = pipeline.resources.nodes or 1
    processes = pipeline.train.num_processes or pipeline.resources.gpus or 1
    counts = () if nodes == processes == 1 else (str(nodes), str(processes))
    return (python, "-m", RETRAINING, *counts)


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
    amend: Callable[[JobSpec], JobSpec] = lambda spec: spec,
) -> Job:
    """Submit the retraining of the commit `revision`, or of the commit that the push `payload`
    names. If both are None, it is the head (the newest commit) of the branch that the pipeline
    follows. The job starts as soon as no other job of the pipeline runs.

    `hub_url` is the URL of the stack's own hub. `RetrainSettings` explains `force_reason` and
    `skip_if`. `amend` makes the last changes to the spec.

    A commit that is not named is not chosen now: the job gets the head of the branch when it
    starts, so that it never trains on an older commit than a job that started before it.

    Raises NoHead for an unknown commit, HeadAway if the hub (or the git server) cannot be reached,
    and PipelineError if `payload` names no commit of the branch. If the dataset is a git URL, this
    function does not check whether the commit exists; if it does not exist, the job fails. Raises
    PendingJob if the pipeline already has a pending job that was submitted by hand.
    """
    rule = retrain_rule(settings, home, pipeline, force_reason=force_reason, skip_if=skip_if)
    source = _source_of(hub_url, home, settings, pipeline)
    if payload is not None:
        revision = _pushed_commit(payload, rule.ref)
    if revision is None:
        ask_head(source, rule.ref)  # raises an error if there is none
        revisions = RevisionRange(repo=pipeline.dataset, ref=rule.ref)
    else:
        revisions, made = _push(source, rule.ref, _commit(source, revision))
        payload = payload or made
    # The job need not wait for deliveries, because a job by hand gets none.
    spec = rule.spec.model_copy(update={"revisions": revisions, "debounce_seconds": 0.0})
    return store.submit(amend(spec), payload=payload, by_hand=True)


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
    amend: Callable[[JobSpec], JobSpec] = lambda spec: spec,
) -> Job:
    """Submit a command. If `pipeline` is not None, the command gets the environment variables of
    the pipeline's jobs and, without `payload`, the payload that the hub would send for a push of
    the commit `revision`. If `revision` is None, that payload is for the newest commit of the
    pipeline's branch. If the hub cannot name the newest commit, for example because the branch has
    no commit yet, the command gets no payload. `amend` makes the last changes to the spec.

    Raises NoHead for an unknown `revision`, and HeadAway if the hub cannot be asked for it. If the
    dataset is a git URL, this function does not check whether the commit `revision` exists.
    """
    env: dict[str, str] = {}
    if pipeline is not None:
        rule = retrain_rule(settings, home, pipeline)
        env = rule.spec.env
    if pipeline is not None and payload is None:
        source = _source_of(hub_url, home, settings, pipeline)
        try:
            sha = ask_head(source, rule.ref) if revision is None else _commit(source, revision)
            _, payload = _push(source, rule.ref, sha)
        except (NoHead, HeadAway):
            if revision is not None:
                raise
    spec = amend(JobSpec(command=command, env=env))
    return store.submit(spec, payload=payload, by_hand=True)


def _pushed_commit(payload: dict[str, Any], ref: str) -> str:
    """The commit to which this push has moved `ref`. Raises PipelineError."""
    try:
        refs = WebhookPayload.model_validate(payload).updatedRefs or ()
    except ValidationError as error:
        faults = faults_in("--payload is not the payload of a webhook", error)
        raise PipelineError("; ".join(faults[:3])) from None
    commit = next((each.newSha for each in refs if each.ref == ref), None)
    if commit is None:
        raise PipelineError(f"--payload names no commit of {ref}; use --revision instead")
    return commit


def _source_of(hub_url: str, home: Home, settings: Settings, pipeline: PipelineSettings) -> Source:
    token = load_tokens(home.tokens_file).hub
    return source_of(pipeline.dataset, settings.other_hub(pipeline), hub_url, token)
