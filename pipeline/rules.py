"""Makes a `RetrainRule` from the settings of a pipeline. The receiver uses this rule to make a job
from a push."""

from jobs.spec import Resources
from pipeline.paths import Home
from pipeline.retrain.settings import RetrainSettings, SkipIf
from pipeline.settings import PipelineSettings, Settings
from receiver.rules import RetrainRule


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
    ref, other_hub = branch_ref(pipeline), settings.other_hub(pipeline)
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


def branch_ref(pipeline: PipelineSettings) -> str:
    """The full name of the branch that the pipeline follows, such as `refs/heads/main`."""
    return pipeline.ref if pipeline.ref.startswith("refs/") else f"refs/heads/{pipeline.ref}"
