"""The checks of `pipeline doctor` that find out whether jobs can run, how the last jobs ended,
whether the job of a newest commit is lost, and whether the runner serves its metrics."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import httpx

from jobs.errors import JobError
from jobs.launchers.process import is_alive
from pipeline.doctor_deliveries import got_job
from pipeline.errors import PipelineError
from pipeline.findings import Finding, ok, wrong
from pipeline.job_store import reading_jobs
from pipeline.journal import WAYS_ON, next_step
from pipeline.newest_commit import newest_commit
from pipeline.paths import Home
from pipeline.probes import port_fault
from pipeline.retrain.reporters import check_reporters
from pipeline.settings import PipelineSettings, Settings, settings_file
from pipeline.stack_record import read_stack
from serving.errors import ServingError
from serving.weights.release_store import load_release, served_release

NEEDED_TO_TRAIN = ("torch", "transformers", "datasets", "safetensors")


def check_base_models(home: Home, settings: Settings) -> Iterator[Finding]:
    for pipeline in settings.pipelines:
        missing = pipeline.missing_base()
        if missing is not None:
            yield wrong("base model", missing, "do what the message says")
        else:
            yield ok("base model", f"{pipeline.name}: {pipeline.base_model}")


def check_trainers(home: Home, settings: Settings) -> Iterator[Finding]:
    """Checks for each pipeline whether its jobs can start. If the setting `command` names the
    user's own trainer, the program of this trainer must exist. Otherwise, the modules that the
    built-in training imports must be installed, and the reporters in `report_to` too."""
    for pipeline in settings.pipelines:
        faults = list(_check_command(pipeline) if pipeline.command else _check_training(pipeline))
        yield from faults
        if not faults:
            what = pipeline.command[0] if pipeline.command else "the built-in training"
            yield ok("trainer", f"{pipeline.name}: {what}")


def _check_command(pipeline: PipelineSettings) -> Iterator[Finding]:
    assert pipeline.command is not None
    program = pipeline.command[0]
    if shutil.which(program) is None:
        what = "is not an executable program" if "/" in program else "is not a program on PATH"
        yield wrong(
            "trainer",
            f"{pipeline.name}: {program} {what}, so every job fails",
            f"correct `command` under [[pipelines]] in {settings_file()}, or install the program",
        )


def _check_training(pipeline: PipelineSettings) -> Iterator[Finding]:
    missing = [name for name in NEEDED_TO_TRAIN if find_spec(name) is None]
    if missing:
        needs = "the built-in training needs " + ("them" if len(missing) > 1 else "it")
        if pipeline.train.lora_rank is not None:
            needs = f"{needs}, also for training with LoRA (`lora_rank`)"
        yield wrong(
            "trainer",
            f"{pipeline.name}: {', '.join(missing)} not installed; {needs}",
            "pip install 'hotpush[torch]', or set `command` under [[pipelines]]",
        )
    for name in pipeline.train.report_to:
        try:
            check_reporters([name])
        except PipelineError as error:
            yield wrong("trainer", f"{pipeline.name}: {error}", "do what the message says")


def check_metrics_port(home: Home, settings: Settings) -> Iterator[Finding]:
    """If a stack is up, checks whether its runner serves the metrics on the configured port. But
    checks nothing if the runner is dead or was started without metrics. If no stack is up, checks
    whether the port is free."""
    port = settings.jobs.metrics_port
    step = "free the port, or set another metrics_port under [jobs]; 0 turns the metrics off"
    record = read_stack(home)
    if record is None:
        if port and port_fault(f"http://127.0.0.1:{port}") is not None:
            message = f"port {port} of the runner's metrics is in use, although no stack is up"
            yield wrong("ports", message, step)
        return
    runner = next((child for child in record.children if child.metrics_port is not None), None)
    if runner is None or runner.process is None or not is_alive(runner.process):
        return
    if not _serves_our_metrics(port):
        message = (
            f"port {port} does not serve the runner's metrics; does another program use this port?"
        )
        yield wrong("ports", message, f"{step}; then restart the stack")
    else:
        yield ok("metrics", f"the runner serves its metrics on port {port}")


def _serves_our_metrics(port: int) -> bool:
    try:
        response = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=5, trust_env=False)
    except httpx.HTTPError:
        return False
    return "pipeline_outcomes" in response.text


def check_last_jobs(home: Home, settings: Settings) -> Iterator[Finding]:
    try:
        with reading_jobs(settings, home) as store:
            if store is None:
                return
            for pipeline in settings.pipelines:
                jobs = store.list(pipeline=pipeline.name, limit=20)
                last = next((job for job in jobs if job.has_ended), None)
                if last is None:
                    yield ok("jobs", f"{pipeline.name}: no job has ended yet")
                elif last.outcome is None:
                    yield ok("jobs", f"{pipeline.name}: {last.id} {last.state.lower()}")
                elif last.outcome.result in ("failed", "rejected"):
                    yield wrong(
                        "jobs",
                        f"{pipeline.name}: {last.id} {last.outcome.result}: {last.outcome.reason}",
                        f"pipeline jobs logs {last.id}; then "
                        + next_step(
                            jobs,
                            WAYS_ON
                            if last.outcome.result == "rejected"
                            else "push again, or: pipeline jobs run",
                        ),
                    )
                else:
                    yield ok("jobs", f"{pipeline.name}: {last.id} {last.outcome.result}")
    except JobError:
        return  # `_check_schemas` has already reported this error


def check_newest_commits(home: Home, settings: Settings) -> Iterator[Finding]:
    """Checks whether the job of the newest commit of each followed branch still exists. The job is
    lost if the receiver answered the delivery of the commit with the id of a job, but no job in the
    job database trains on the commit. This happens, for example, if the job database was deleted.

    Checks only branches on the stack's own hub, and only while a stack is up. Skips a commit that
    the served release was trained on, because this commit needs no job any more.
    """
    if read_stack(home) is None:
        return
    for pipeline in settings.pipelines:
        head = newest_commit(home, settings, pipeline) if settings.is_on_own_hub(pipeline) else None
        if head is None or head == _served_revision(home, pipeline) or not got_job(home, head):
            continue
        try:
            with reading_jobs(settings, home) as store:
                # A pending job will train on the head.
                jobs = [] if store is None else [*store.of_commit(head)]
                jobs += [] if store is None else store.list(state="SCHEDULING")
        except JobError:
            return  # the check of the job database has already reported this error
        if pipeline.name not in {job.spec.pipeline for job in jobs}:
            yield wrong(
                "jobs",
                f"{pipeline.name}: the job of the newest commit of {pipeline.ref}, {head[:12]}, "
                "is lost",
                f"pipeline jobs run --pipeline {pipeline.name}",
            )


def _served_revision(home: Home, pipeline: PipelineSettings) -> str | None:
    try:
        served = served_release(home.releases_dir / pipeline.name)
        return None if served is None else load_release(served).lineage.dataset_revision
    except ServingError:
        return None  # the check of the releases reports this error
