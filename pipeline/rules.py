"""From the settings of a pipeline to the rule that turns its commits into jobs."""

from jobs.spec import Resources
from pipeline.paths import Home
from pipeline.retrain.settings import RetrainSettings
from pipeline.settings import PipelineSettings, Settings, settings_file
from receiver.retrain import RetrainRule


def retrain_rules(settings: Settings, home: Home) -> tuple[RetrainRule, ...]:
    return tuple(retrain_rule(settings, home, pipeline) for pipeline in settings.pipelines)


def retrain_rule(
    settings: Settings, home: Home, pipeline: PipelineSettings, *, force_reason: str | None = None
) -> RetrainRule:
    """What a job of this pipeline will be told, frozen from the settings as they are now."""
    ref = pipeline.ref if pipeline.ref.startswith("refs/") else f"refs/heads/{pipeline.ref}"
    retrain = RetrainSettings(
        pipeline=pipeline.name,
        dataset=pipeline.dataset,
        ref=ref,
        base_model=str(pipeline.base_folder() or pipeline.base_model),
        base_model_endpoint=pipeline.base_model_endpoint,
        releases_dir=home.releases_dir,
        bases_dir=home.bases_dir,
        keep=pipeline.keep,
        train=pipeline.train,
        gate=pipeline.gate,
        force_reason=force_reason,
    )
    own = {} if pipeline.command is None else {"command": _program(*pipeline.command)}
    return RetrainRule(
        **own,
        pipeline=pipeline.name,
        dataset=pipeline.dataset,
        ref=ref,
        debounce_seconds=pipeline.debounce_seconds,
        max_wait_seconds=pipeline.max_wait_seconds,
        settings=retrain.model_dump(mode="json"),
        env={"PIPELINE_SERVER_URL": settings.server_url(pipeline)},
        resources=Resources(
            num_threads=settings.jobs.num_threads, timeout_seconds=settings.jobs.timeout_seconds
        ),
    )


def _program(name: str, *arguments: str) -> tuple[str, ...]:
    """A job runs in a folder of its own: a relative path means one beside the settings."""
    return (str(settings_file().parent / name) if "/" in name else name, *arguments)
