"""`pipeline jobs run`: submits a retraining or a command, and shows it until it has ended."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from jobs.job import Job, seal
from jobs.spec import LOCAL, JobSpec, Resources
from jobs.store import JobStore
from pipeline.cli.progress import follow_to_end, report_end
from pipeline.cli.terminal import JsonOption, PipelineOption, seconds, without_none
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.runner.by_hand import with_runner
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import submit_command, submit_retraining
from pipeline.settings import PipelineSettings, Settings
from pipeline.stack.record import running_settings, stale_settings
from pipeline.tokens import load_tokens

DetachOption = Annotated[
    bool, typer.Option("--detach", "-d", help="Print the job's id and return at once.")
]


def run(
    command: Annotated[
        list[str] | None, typer.Argument(help="After `--`: a command to run as a job.")
    ] = None,
    pipeline: PipelineOption = None,
    revision: Annotated[str | None, typer.Option(help="A commit. Default: the newest.")] = None,
    mode: Annotated[
        Literal["full", "delta"] | None,
        typer.Option(help="Train in this mode, even if no row has changed."),
    ] = None,
    payload: Annotated[
        Path | None, typer.Option(help="A file with the payload of a push, instead of --revision.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go past the gate. Needs --reason.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option(help="Why you use --force. The outcome shows it.")
    ] = None,
    launcher: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Where to run: `local`, or a launcher of the settings."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs to ask the launcher for.")] = None,
    image: Annotated[str | None, typer.Option(help="The container image to run there.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="TIME", help="Stop the job after TIME, as in 30m."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A variable of the job. May be repeated."),
    ] = None,
    secret: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY[=VALUE]",
            help="A variable that nothing shows. Without a value: the one that your shell has.",
        ),
    ] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="A label of the job. May be repeated."),
    ] = None,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a retraining job now. If the command line ends with `--` and a command, run this command
    as a job instead, with the environment variables of a job.

    If the rows, the base model and the training settings are the same as for the served release,
    the retraining ends as `unchanged`, without training. With --mode or --force, it always trains:
    --mode full trains the base model on every row, and --mode delta the served release on the
    changed rows; --force makes and serves a new release even if the gate refuses the new rows or
    the new weights. If a job of the pipeline is running, the retraining waits until that job has
    ended. The retraining is never merged with the job of a push.

    If no stack is up, `jobs run` starts a hub and a runner for the job. The exit code says how a
    retraining ended: 0 promoted, published or unchanged; 1 failed; 3 rejected by the gate;
    4 superseded by a swap to another release; 5 cancelled. If you gave a command, `jobs run` prints
    the command's output and exits with the command's exit code.
    """
    home = Home.find()
    loaded = running_settings(home)
    if command and (force or mode is not None):
        raise PipelineError(
            "--force and --mode work only for a retraining; leave them out, or leave out the "
            "command"
        )
    if payload is not None and revision is not None:
        raise PipelineError("--payload and --revision both name the commit; leave out one of them")
    if force is not bool(reason):
        raise PipelineError("--force and --reason must be used together: --force --reason 'why'")
    content = None if payload is None else _read_payload(payload)
    resources = Resources()
    if command:
        program = command[0] if launcher not in (None, LOCAL) else _program(command[0])
        of_pipeline = _pipeline_of_command(loaded, pipeline, revision)
    else:
        chosen = loaded.pipeline(pipeline)
        if mode is not None:
            train = chosen.train.model_copy(update={"mode": mode})
            chosen = chosen.model_copy(update={"train": train})
        launcher, resources = launcher or chosen.launcher, chosen.resources
    launcher = launcher or LOCAL
    resources = resources.model_copy(update=without_none(gpus=gpus, image=image))
    if fault := loaded.misfit(launcher, resources):
        raise PipelineError(fault)
    place = {"launcher": launcher, "resources": resources}
    if not command:
        chosen = chosen.model_copy(update=place)

    variables, labels = _pairs("--env", env), _pairs("--label", label)
    shell = [each if "=" in each else f"{each}={_of_shell(each)}" for each in secret or ()]
    secrets = _pairs("--secret", shell)

    def amend(spec: JobSpec) -> JobSpec:
        key = load_tokens(home.tokens_file).key.encode()
        changes = {
            **place,
            "env": {**spec.env, **variables},
            "sealed_env": seal(secrets, key) if secrets else None,
            "labels": {**spec.labels, **labels},
            "timeout_seconds": timeout,
        }
        return spec.model_copy(update=changes)

    def submit(store: JobStore, hub_url: str) -> Job:
        if command:
            return submit_command(
                store,
                home,
                loaded,
                hub_url=hub_url,
                pipeline=of_pipeline,
                revision=revision,
                payload=content,
                command=(program, *command[1:]),
                amend=amend,
            )
        return submit_retraining(
            store,
            home,
            loaded,
            hub_url=hub_url,
            pipeline=chosen,
            revision=revision,
            payload=content,
            force_reason=reason,
            skip_if="never" if mode is not None else "nothing_changed",
            amend=amend,
        )

    run_to_end(home, loaded, submit, detach=detach, as_json=as_json)


def run_to_end(
    home: Home,
    settings: Settings,
    submit: Callable[[JobStore, str], Job],
    *,
    detach: bool = False,
    as_json: bool = False,
) -> None:
    """Submit a job, and show it until it has ended. `submit` gets the job store and the hub's
    URL."""
    if (changed := stale_settings(home)) is not None:
        print(f"pipeline: {changed}", file=sys.stderr)
    with (
        with_runner(home, settings, detach=detach) as hub_url,
        open_job_store(settings, home) as store,
    ):
        job = submit(store, hub_url)
        if detach:
            print(json.dumps({"job": job.id}) if as_json else job.id)
            return
        job = follow_to_end(store, job, home, quiet=as_json)
    report_end(job, as_json)


def _pipeline_of_command(
    settings: Settings, name: str | None, revision: str | None
) -> PipelineSettings | None:
    """The pipeline whose environment variables the command gets. None if the command gets the
    variables of no pipeline.

    If there is a `name`, this is the pipeline with this name. Raises PipelineError if no pipeline
    has this name.

    If there is no `name`, and exactly one pipeline is configured, this is that pipeline. If there
    is no `name`, and no pipeline or several pipelines are configured, this is None. But if the
    caller gave a `revision` in that case, this raises PipelineError, because nobody knows which
    dataset has this commit.
    """
    if name is None and revision is None and len(settings.pipelines) != 1:
        return None
    return settings.pipeline(name)


def _pairs(option: str, values: Sequence[str] | None) -> dict[str, str]:
    pairs = dict(each.partition("=")[::2] for each in values or () if each.find("=") > 0)
    if wrong := [each for each in values or () if each.find("=") <= 0]:
        raise PipelineError(f"{option} {wrong[0]}: write {option} KEY=VALUE")
    return pairs


def _of_shell(name: str) -> str:
    if name not in os.environ:
        raise PipelineError(
            f"--secret {name}: your shell has no variable {name}; export it, or write "
            f"--secret {name}=VALUE"
        )
    return os.environ[name]


def _program(name: str) -> str:
    """The name or path of the program. A relative path is made absolute, because the job runs in
    another folder. Raises PipelineError if there is no such program."""
    if shutil.which(name) is None:
        raise PipelineError(
            f"there is no program {name!r} on PATH; check the command after `--`"
            if "/" not in name
            else f"{name} is not an executable program; check that the file exists and is "
            "executable"
        )
    return str(Path(name).absolute()) if "/" in name else name


def _read_payload(file: Path) -> dict[str, Any]:
    try:
        payload = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(f"--payload {file} cannot be read as JSON: {error}") from None
    if not isinstance(payload, dict):
        raise PipelineError(f"--payload {file} is not a JSON object")
    return payload
