"""`pipeline jobs`: run one by hand, and see, follow, cancel or wait for any."""

import json
import shutil
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli.options import JsonOption, PipelineOption
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from jobs.record import Job
    from jobs.store import JobStore

app = typer.Typer(help="Run, list, follow, cancel and wait for jobs.", no_args_is_help=True)

EXIT_CODES = {
    "promoted": 0,
    "published": 0,
    "unchanged": 0,
    "failed": 1,
    "rejected": 3,
    "superseded": 4,
    "cancelled": 5,
}
"""Of `run` and `wait`, by outcome. 2 is a command line that cannot be understood."""

JobArgument = Annotated[str | None, typer.Argument(help="A job's id, as `jobs ls` shows it.")]
LatestOption = Annotated[bool, typer.Option("--latest", help="The newest job.")]


@app.command()
def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After `--`: any command, in the environment of a job."),
    ] = None,
    pipeline: PipelineOption = None,
    revision: Annotated[
        str | None, typer.Option(help="A commit of the dataset; its head by default.")
    ] = None,
    payload: Annotated[
        Path | None, typer.Option(help="A webhook payload (JSON) to hand to the job.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Go past a refusing gate; needs --reason.")
    ] = False,
    reason: Annotated[
        str | None, typer.Option(help="Why; the outcome and `releases show` tell it.")
    ] = None,
    detach: Annotated[
        bool, typer.Option("--detach", "-d", help="Print the id and return.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Run the retraining job now, or, after `--`, a command of your own.

    Starts what it needs when nothing is up. The exit code says how the job ended: 0 promoted,
    published or unchanged; 1 failed; 3 rejected by the gate; 4 superseded; 5 cancelled.
    """
    from pipeline.by_hand import submit, submit_bare, with_runner
    from pipeline.settings import load_settings
    from pipeline.stack import stale_settings

    home, settings = Home.find(), load_settings()
    if command and force:
        raise PipelineError("--force belongs to the retraining job, not to a command")
    if force is not bool(reason):
        raise PipelineError("--force and --reason belong together: --force --reason 'why'")
    if command and shutil.which(command[0]) is None:
        raise PipelineError(
            f"there is no program {command[0]!r} on PATH; a command of your own stands after `--`"
        )
    asked = _read_payload(payload)
    if (changed := stale_settings(home)) is not None:
        print(f"pipeline: {changed}", file=sys.stderr)
    with with_runner(home, settings, detach=detach) as hub_url, _open_store(home) as store:
        try:
            job = submit(
                store,
                home,
                settings,
                hub_url=hub_url,
                pipeline=settings.pipeline(pipeline),
                revision=revision,
                payload=asked,
                force_reason=reason,
                command=tuple(command or ()),
            )
        except PipelineError:
            # A command needs no commit; only who names one must get it.
            if not command or revision or asked or pipeline:
                raise
            job = submit_bare(store, tuple(command))
        if detach:
            print(json.dumps({"job": job.id}) if as_json else job.id)
            return
        job = _follow(store, job.id, home, quiet=as_json)
    _report(job, as_json)


@app.command()
def ls(
    pipeline: PipelineOption = None,
    limit: Annotated[int, typer.Option(help="How many, newest first.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with _reading(Home.find()) as store:
        jobs = store.list(pipeline=pipeline, limit=limit) if store is not None else []
    if as_json:
        print(json.dumps([as_record(job) for job in jobs]))
        return
    from pipeline.journal import subject

    print_table(
        ("job", "state", "outcome", "release", "answers for", "seconds"),
        [
            (
                job.id,
                job.state,
                job.outcome.result if job.outcome else "",
                (job.outcome.release or "") if job.outcome else "",
                subject(job),
                _seconds(job),
            )
            for job in jobs
        ],
        empty="No job yet.",
    )


@app.command()
def inspect(
    job: JobArgument = None, latest: LatestOption = False, as_json: JsonOption = False
) -> None:
    """Show how a job stands and what it is about; with --json everything that is known of it."""
    home = Home.find()
    with _reading(home) as store:
        found = _find(store, job, latest)[1]
    if as_json:
        print(json.dumps(as_record(found), indent=2))
        return
    for name, text in _facts(found, home):
        print(f"{name:12}  {text}")


@app.command()
def logs(
    job: JobArgument = None,
    latest: LatestOption = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the job ends.")] = False,
) -> None:
    """Print what a job wrote."""
    from jobs.logs import follow_log, read_log

    home = Home.find()
    with _reading(home) as store:
        store, found = _find(store, job, latest)
        job_id = found.id
        if follow:
            for text in follow_log(store, home.jobs_dir, job_id):
                sys.stdout.buffer.write(text)
                sys.stdout.flush()
        else:
            offset = 0
            while text := read_log(home.jobs_dir, job_id, offset):
                sys.stdout.buffer.write(text)
                offset += len(text)


@app.command()
def cancel(
    job: JobArgument = None, latest: LatestOption = False, as_json: JsonOption = False
) -> None:
    """End a job that waits, or ask one that runs to stop."""
    with _open_store(Home.find()) as store:
        _, found = _find(store, job, latest)
        if found.has_ended:
            raise PipelineError(f"{found.id} has ended already: {found.state}")
        state = store.cancel(found.id).state
    if as_json:
        print(json.dumps({"job": found.id, "state": state}))
    else:
        print(f"{found.id} {'is cancelled' if state == 'CANCELED' else 'was asked to stop'}")


@app.command()
def wait(
    job: JobArgument = None,
    latest: LatestOption = False,
    timeout: Annotated[float | None, typer.Option(help="Seconds to wait at most.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Follow a job until it ends; the exit code is that of `jobs run`, or 124 at the time-out."""
    home = Home.find()
    with _reading(home) as store:
        store, found = _find(store, job, latest)
        _report(_follow(store, found.id, home, quiet=as_json, timeout=timeout), as_json)


@app.command(hidden=True)
def runner(
    until_idle: Annotated[bool, typer.Option(help="End once no job is left.")] = False,
    with_hub: Annotated[bool, typer.Option(help="Run a hub beside it.")] = False,
) -> None:
    """Run the jobs of this state folder (`pipeline up` starts this)."""
    from pipeline.by_hand import run_jobs

    run_jobs(Home.find(), until_idle=until_idle, with_hub=with_hub)


def as_record(job: "Job") -> dict[str, Any]:
    """The job as JSON."""
    from dataclasses import asdict

    return asdict(job) | {
        "spec": job.spec.model_dump(mode="json"),
        "outcome": job.outcome.model_dump(mode="json") if job.outcome else None,
    }


def _facts(job: "Job", home: Home) -> Iterator[tuple[str, str]]:
    """What a person asks about a job first, as names and values."""
    from pipeline.journal import subject

    outcome, revisions = job.outcome, job.spec.revisions
    yield "job", job.id
    yield "state", job.state
    if outcome is not None:
        where = f" in {outcome.stage}" if outcome.stage else ""
        yield "outcome", f"{outcome.result}{where}"
        told = {
            "reason": outcome.reason,
            "release": outcome.release,
            "parent": outcome.parent_release,
            "serves now": outcome.served_release,
        }
        yield from ((name, text) for name, text in told.items() if text)
    yield "answers for", subject(job)
    if revisions is not None:
        yield "commits", f"{revisions.old_sha or 'the first'} → {revisions.new_sha}"
        if revisions.delivery_ids:
            yield "deliveries", " ".join(revisions.delivery_ids)
    yield "command", " ".join(job.spec.command)
    yield "created", _moment(job.created_at)
    if job.started_at is not None:
        attempts = f", attempt {job.attempt}" if job.attempt > 1 else ""
        yield "started", f"{_moment(job.started_at)}, {_seconds(job)} s{attempts}"
    yield "folder", str(home.jobs_dir / job.id)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")


def _open_store(home: Home) -> "JobStore":
    from pipeline.job_store import open_job_store
    from pipeline.settings import load_settings

    return open_job_store(load_settings(), home)


def _reading(home: Home) -> "AbstractContextManager[JobStore | None]":
    from pipeline.job_store import reading_jobs
    from pipeline.settings import load_settings

    return reading_jobs(load_settings(), home)


def _find(store: "JobStore | None", job_id: str | None, latest: bool) -> "tuple[JobStore, Job]":
    """The job, and the store, which is there then."""
    if (job_id is None) is not latest:
        raise PipelineError("name one job, or say --latest")
    if store is not None and job_id is not None:
        return store, store.get(job_id)
    jobs = store.list(limit=1) if store is not None else []
    if store is None or not jobs:
        raise PipelineError("there is no job yet; push to the dataset, or: pipeline jobs run")
    return store, jobs[0]


def _follow(
    store: "JobStore", job_id: str, home: Home, *, quiet: bool, timeout: float | None = None
) -> "Job":
    from rich.console import Console

    from pipeline.cli.progress import follow

    deadline = None if timeout is None else time.monotonic() + timeout
    job = follow(store, job_id, home, Console(quiet=quiet, highlight=False), deadline)
    if not job.has_ended:
        print(f"pipeline: {job.id} is still {job.state} after {timeout:g} s", file=sys.stderr)
        raise typer.Exit(124)
    return job


def _report(job: "Job", as_json: bool) -> None:
    from pipeline.journal import describe

    print(json.dumps(as_record(job)) if as_json else describe(job))
    if job.outcome is not None and (code := EXIT_CODES[job.outcome.result]):
        raise typer.Exit(code)


def _read_payload(file: Path | None) -> dict[str, Any] | None:
    if file is None:
        return None
    try:
        payload = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise PipelineError(f"--payload {file} cannot be read as JSON: {error}") from None
    if not isinstance(payload, dict):
        raise PipelineError(f"--payload {file} holds no JSON object")
    return payload


def _seconds(job: "Job") -> str:
    if job.started_at is None:
        return ""
    return f"{(job.ended_at or time.time()) - job.started_at:.1f}"
