"""Makes jobs from the settings of a pipeline: the rules (`RetrainRule`) by which the receiver makes
a job from a push, and the jobs that a person asks for. Such a job either retrains the model on a
commit, or runs a command."""

import tomllib
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ValidationError

from jobs.errors import HeadAway, NoHead
from jobs.job import Job
from jobs.spec import JobSpec, Resources, RevisionRange
from jobs.store import JobStore
from pipeline.errors import PipelineError
from pipeline.newest_commit import Dataset
from pipeline.paths import Home
from pipeline.retrain.settings import RetrainSettings, SkipIf
from pipeline.settings import PipelineSettings, Settings, fault_text
from pipeline.tokens import load_tokens
from receiver.payload import WebhookPayload
from receiver.rules import RetrainRule, full_ref


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
        force_reason=force_reason,
        skip_if=skip_if,
    )
    trainer = {} if pipeline.command is None else {"command": pipeline.command}
    return RetrainRule(
        **trainer,
        pipeline=pipeline.name,
        dataset=pipeline.dataset,
        endpoint=other_hub,
        ref=ref,
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
        resources=Resources(
            num_threads=settings.jobs.num_threads, timeout_seconds=settings.jobs.timeout_seconds
        ),
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
    commit for this branch, the job retrains on the head (the newest commit) of the branch.

    `hub_url` is the URL of the stack's own hub. `RetrainSettings` explains `force_reason` and
    `skip_if`.

    A commit that is not named is not chosen now: the job gets the head of the branch when it
    starts, so that it never trains on an older commit than a job that started before it.

    Raises NoHead for an unknown commit, HeadAway if the hub (or the git server) cannot be reached,
    and PipelineError for an invalid payload. If the dataset is a git URL, this function does not
    check whether the commit `revision` exists; if it does not exist, the job fails. Raises
    PendingJob if the pipeline already has a pending job that was submitted by hand.
    """
    rule = retrain_rule(settings, home, pipeline, force_reason=force_reason, skip_if=skip_if)
    dataset = _dataset_of(hub_url, home, settings, pipeline)
    sha = revision or (_pushed_commit(payload, rule.ref) if payload is not None else None)
    if sha is None:
        dataset.head(rule.ref)  # raises an error if there is none
    else:
        sha = dataset.commit(sha)
    revisions = RevisionRange(repo=pipeline.dataset, ref=rule.ref, new_sha=sha)
    if payload is None and sha is not None:
        payload = dataset.push_payload(revisions, None, "by-hand")
    # The job need not wait for deliveries, because a job by hand gets none.
    spec = rule.job_spec(revisions).model_copy(update={"debounce_seconds": 0.0})
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

    Raises NoHead for an unknown `revision`, and HeadAway if the hub cannot be asked for it. If the
    dataset is a git URL, this function does not check whether the commit `revision` exists.
    """
    env = {}
    if pipeline is not None:
        env = retrain_rule(settings, home, pipeline).env
        if payload is None:
            dataset = _dataset_of(hub_url, home, settings, pipeline)
            ref = full_ref(pipeline.ref)
            try:
                sha = dataset.head(ref) if revision is None else dataset.commit(revision)
            except (NoHead, HeadAway):
                if revision is not None:
                    raise
            else:
                revisions = RevisionRange(repo=pipeline.dataset, ref=ref, new_sha=sha)
                payload = dataset.push_payload(revisions, None, "by-hand")
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


def _dataset_of(
    hub_url: str, home: Home, settings: Settings, pipeline: PipelineSettings
) -> Dataset:
    token = load_tokens(home.tokens_file).hub
    return Dataset.of(pipeline.dataset, settings.other_hub(pipeline), hub_url, token)


def override(pipeline: PipelineSettings, assignments: Sequence[str]) -> PipelineSettings:
    """The pipeline's settings, changed for one run by these assignments, such as
    `train.max_tokens=500000`.

    An assignment `TABLE.KEY=VALUE` sets one key in one table of the pipeline's settings. The value
    is written as in TOML, except that a text needs no quotes. Raises PipelineError with a message
    that names the wrong key.
    """
    values = pipeline.model_dump(exclude_unset=True)
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        table, dot, key = path.strip().partition(".")
        if not equals or not dot or not key:
            raise PipelineError(
                f"--set {assignment} is not TABLE.KEY=VALUE, as in --set train.max_tokens=500000"
            )
        if table not in _tables():
            raise PipelineError(
                f"--set {assignment}: unknown table {table!r}; known: {', '.join(_tables())}"
            )
        values.setdefault(table, {})[key] = _value(text.strip())
    try:
        return PipelineSettings.model_validate(values)
    except ValidationError as error:
        faults = (
            fault_text(("pipelines", *fault["loc"]), fault["type"], fault["msg"], fault["input"])
            for fault in error.errors()
        )
        raise PipelineError(f"--set: {'; '.join(faults)}") from None


def _tables() -> list[str]:
    fields = PipelineSettings.model_fields.items()
    return [name for name, field in fields if isinstance(field.default, BaseModel)]


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
