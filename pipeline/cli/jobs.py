"""`pipeline jobs`: runs a job; lists, inspects, follows and cancels jobs; waits for a job."""

import json
import sys
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.job_access import (
    JobArgument,
    LatestOption,
    as_record,
    counts_text,
    find_job,
    open_store,
    reading_store,
    seconds_text,
)
from pipeline.cli.jobs_run import run
from pipeline.cli.jobs_wait import wait
from pipeline.cli.options import JsonOption, PipelineOption
from pipeline.cli.project import project_home
from pipeline.cli.tables import print_table
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from jobs.job import Job

app = typer.Typer(help="Run, list, follow, cancel and wait for jobs.", no_args_is_help=True)

app.command()(run)


@app.command()
def ls(
    pipeline: PipelineOption = None,
    limit: Annotated[int, typer.Option(help="How many jobs to list.")] = 20,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with reading_store(project_home()) as store:
        jobs = store.list(pipeline=pipeline, limit=limit) if store is not None else []
    if as_json:
        print(json.dumps([as_record(job) for job in jobs]))
        return
    from pipeline.journal import subject

    print_table(
        ("job", "state", "outcome", "release", "about", "seconds", "counts"),
        [
            (
                job.id,
                job.state,
                job.outcome.result if job.outcome else "",
                (job.outcome.release or "") if job.outcome else "",
                subject(job),
                seconds_text(job),
                counts_text(job),
            )
            for job in jobs
        ],
        empty="No job yet.",
    )
    for job in jobs:
        if job.waits_for is not None:
            print(f"{job.id} waits: {job.waits_for}")


@app.command()
def inspect(
    job: JobArgument = None, latest: LatestOption = False, as_json: JsonOption = False
) -> None:
    """Show a job's state, outcome and commits. With --json, show everything about the job."""
    home = project_home()
    with reading_store(home) as store:
        found = find_job(store, job, latest)[1]
    if as_json:
        print(json.dumps(as_record(found), indent=2))
        return
    for name, text in _facts(found, home):
        print(f"{name:12}  {text}")


@app.command()
def logs(
    job: JobArgument = None,
    latest: LatestOption = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")
    ] = False,
) -> None:
    """Print a job's log."""
    from jobs.logs import follow_log, read_log

    home = project_home()
    with reading_store(home) as store:
        store, found = find_job(store, job, latest)
        if follow:
            for text in follow_log(store, home.jobs_dir, found.id):
                sys.stdout.buffer.write(text)
                sys.stdout.flush()
        else:
            offset = 0
            while text := read_log(home.jobs_dir, found, offset):
                sys.stdout.buffer.write(text)
                offset += len(text)


@app.command()
def cancel(
    job: JobArgument = None, latest: LatestOption = False, as_json: JsonOption = False
) -> None:
    """Cancel a job: remove a pending job from the queue, or stop a running job."""
    with open_store(project_home()) as store:
        _, found = find_job(store, job, latest)
        if found.has_ended:
            raise PipelineError(f"{found.id} has already ended: {found.state}")
        state = store.cancel(found.id).state
    if as_json:
        print(json.dumps({"job": found.id, "state": state}))
    else:
        print(f"{found.id} {'is cancelled' if state == 'CANCELED' else 'was asked to stop'}")


app.command()(wait)


@app.command(hidden=True)
def runner(
    until_idle: Annotated[bool, typer.Option(help="Stop when no job is left.")] = False,
    with_hub: Annotated[bool, typer.Option(help="Also run a hub.")] = False,
) -> None:
    """Run the jobs of this state folder. `pipeline up` starts this command."""
    from pipeline.by_hand import run_jobs

    run_jobs(Home.find(), until_idle=until_idle, with_hub=with_hub)


def _facts(job: "Job", home: Home) -> Iterator[tuple[str, str]]:
    """The names and values that `inspect` prints."""
    from pipeline.journal import subject

    outcome, revisions = job.outcome, job.spec.revisions
    yield "job", job.id
    yield "state", job.state
    if outcome is not None:
        where = f" in {outcome.stage}" if outcome.stage else ""
        yield "outcome", f"{outcome.result}{where}"
        facts = {
            "counts": counts_text(job),
            "reason": outcome.reason,
            "release": outcome.release,
            "parent": outcome.parent_release,
            "serves now": outcome.served_release,
        }
        yield from ((name, text) for name, text in facts.items() if text)
    if job.waits_for is not None:
        yield "waits", job.waits_for
    yield "about", subject(job)
    if revisions is not None:
        new_sha = revisions.new_sha or f"the head of {revisions.ref} when the job starts"
        yield "commits", f"{revisions.old_sha or 'the first'} → {new_sha}"
        if revisions.delivery_ids:
            yield "deliveries", " ".join(revisions.delivery_ids)
    yield "command", " ".join(job.spec.command)
    yield "created", _moment(job.created_at)
    if job.started_at is not None:
        attempts = f", attempt {job.attempt}" if job.attempt > 1 else ""
        yield "started", f"{_moment(job.started_at)}, {seconds_text(job)} s{attempts}"
    yield "folder", str(home.jobs_dir / job.id)


def _moment(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().isoformat(sep=" ", timespec="seconds")
