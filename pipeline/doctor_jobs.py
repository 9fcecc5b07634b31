"""The checks of `pipeline doctor` that find out whether jobs can run, and whether the runner serves
its metrics."""

import shutil
from collections.abc import Iterator
from importlib.util import find_spec

import httpx

from jobs.launchers.process import is_alive
from pipeline.errors import PipelineError
from pipeline.findings import Finding, ok, wrong
from pipeline.paths import Home
from pipeline.probes import port_fault
from pipeline.retrain.reporters import check_reporters
from pipeline.rules import absolute_command
from pipeline.settings import PipelineSettings, Settings, settings_file
from pipeline.stack_record import read_stack

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
    program = absolute_command(*pipeline.command)[0]
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
            needs = f"{needs}, whatever `lora_rank` is set to"
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
    """Checks whether the runner serves its metrics. If the stack is up, but its runner is dead or
    serves no metrics, checks nothing. If no stack is up, checks instead whether the port for the
    metrics is free."""
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
