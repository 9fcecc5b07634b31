"""`pipeline jobs`: runs a job; lists, inspects, follows and cancels jobs; waits for a job."""

import json
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from typing import Annotated

import typer

from jobs.folder import tail_offset
from jobs.job import Job, JobState
from jobs.store import JobStore
from pipeline.cli.jobs_run import DetachOption, run, run_to_end
from pipeline.cli.progress import (
    JobArgument,
    LatestOption,
    as_record,
    counts_text,
    find_job,
    follow_output,
    follow_to_end,
    no_job_yet,
    reading_store,
    report_end,
    seconds_text,
    timed_out,
)
from pipeline.cli.terminal import (
    ChangesStack,
    JsonOption,
    PipelineOption,
    print_table,
    project_home,
    seconds,
)
from pipeline.doctor.facts import subject, wrong_answers
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.retrain.errors import SnapshotError
from pipeline.retrain.job import WrongAnswers
from pipeline.runner.job_store import NOWHERE, open_job_store
from pipeline.runner.run import run_jobs
from pipeline.runner.submit import source_of_job
from pipeline.settings import load_settings
from pipeline.stack.record import running_settings
from pipeline.tokens import load_tokens

app = typer.Typer(help="Run, list, follow, cancel and wait for jobs.", no_args_is_help=True)

ARRIVAL_SECONDS = 30.0
"""`jobs wait --commit` gives up if the job store still has no job for the commit after this many
seconds."""
POLL_SECONDS = 0.1
NUM_WATCHED = 20
"""`jobs wait --commit` looks at this many of the newest jobs for one that took over."""

app.command(cls=ChangesStack)(run)


@app.command()
def ls(
    pipeline: PipelineOption = None,
    limit: Annotated[int, typer.Option(help="How many jobs to list.")] = 20,
    state: Annotated[JobState | None, typer.Option(help="Only jobs in this state.")] = None,
    since: Annotated[
        float | None,
        typer.Option(parser=seconds, metavar="TIME", help="Only jobs of the last TIME, as in 2h."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List jobs, newest first."""
    with reading_store(project_home()) as store:
        after = None if since is None else store.now() - since
        jobs = store.list(pipeline=pipeline, state=state, limit=limit, since=after)
    if as_json:
        print(json.dumps([as_record(job) for job in jobs]))
        return
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
    job: JobArgument = None,
    latest: LatestOption = False,
    rows: Annotated[
        bool, typer.Option("--rows", help="Show what the model says instead of its rows.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Print everything about a job, always as JSON; with --rows, what the model says instead of the
    job's rows."""
    home = project_home()
    with reading_store(home) as store:
        found = find_job(store, job, latest)
    if rows:
        _print_wrong(wrong_answers(home.jobs_dir / found.id), as_json=as_json)
        return
    print(json.dumps(as_record(found), indent=2))


def _print_wrong(found: WrongAnswers | None, *, as_json: bool) -> None:
    if found is None:
        raise PipelineError(
            "this job has asked no model; `pipeline jobs inspect` shows its outcome"
        )
    if as_json:
        print(found.model_dump_json(indent=2))
        return
    for each in found.answers:
        words = ", in other words" if each.is_reworded else ""
        print(f"{each.place}{words}: {each.question}")
        print(f"  wanted: {each.wanted}")
        other = f"   (the answer of {each.answer_of})" if each.answer_of is not None else ""
        print(f"  said:   {each.said}{other}")
    if not found.answers:
        print("Every question was answered as its row says.")


@app.command()
def logs(
    job: JobArgument = None,
    latest: LatestOption = False,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing new lines until the job ends.")
    ] = False,
    tail: Annotated[
        int | None, typer.Option(min=0, help="Print only this many of the last lines.")
    ] = None,
) -> None:
    """Print a job's log."""
    home = project_home()
    with reading_store(home) as store:
        found = find_job(store, job, latest)
        deadline = None if follow else time.monotonic()
        offset = 0
        if tail is not None:
            offset = tail_offset(home.jobs_dir / found.id, found.identity, tail)
        follow_output(store, found.id, home, sys.stdout.buffer, deadline, offset)
    host = (found.handle or "").partition(" ")[0]
    is_here = host in ("", socket.gethostname()) or host.startswith("elsewhere:")
    if not is_here and not (home.jobs_dir / found.id).exists():
        raise PipelineError(
            f"the log of {found.id} is on {host}; to see it here, share {home.jobs_dir} among the "
            "machines of the runners"
        )


@app.command(cls=ChangesStack)
def cancel(job: JobArgument = None, latest: LatestOption = False) -> None:
    """Cancel a job: remove a pending job from the queue, or stop a running job."""
    with open_job_store(load_settings(), project_home()) as store:
        found = find_job(store, job, latest)
        if found.has_ended:
            raise PipelineError(f"{found.id} has already ended: {found.state}")
        state = store.cancel(found.id).state
    print(f"{found.id} {'is cancelled' if state == 'CANCELED' else 'was asked to stop'}")


@app.command(cls=ChangesStack)
def retry(
    job: JobArgument = None,
    latest: LatestOption = False,
    detach: DetachOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run an ended job again: submit its command, commit, settings and secrets as a new job. The
    output and the exit code are those of `jobs run`."""
    home = project_home()
    settings = running_settings(home)

    def submit(store: JobStore, _: str) -> Job:
        found = find_job(store, job, latest)
        if not found.has_ended:
            raise PipelineError(
                f"{found.id} has not ended; wait for it, or cancel it: pipeline jobs cancel "
                f"{found.id}"
            )
        return store.repeat(found.id)

    run_to_end(home, settings, submit, detach=detach, as_json=as_json)


@app.command()
def wait(
    job: JobArgument = None,
    latest: LatestOption = False,
    commit: Annotated[
        str | None, typer.Option(help="Wait for the job of this pushed commit.")
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(help="Only with --commit: the pipeline of the job.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Wait at most this many seconds.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a job ends. The exit code is the same as for `jobs run`, or 124 if the time of
    --timeout is over.

    Right after a push, use `--commit HEAD`: the push may not have its job yet, and `--latest` would
    then wait for an earlier job. `--commit` takes the commit's id or, in a clone of the dataset, a
    name such as HEAD. If several pipelines have a job for the commit, add `--pipeline`.
    """
    home = project_home()
    deadline = None if timeout is None else time.monotonic() + timeout
    if commit is not None and (job is not None or latest):
        raise PipelineError("--commit cannot be combined with a job id or --latest; give only one")
    if pipeline is not None and commit is None:
        raise PipelineError(f"--pipeline {pipeline} works only with --commit; give the job's id")
    with reading_store(home) as store:
        if commit is None:
            found = find_job(store, job, latest)
            ended = follow_to_end(store, found, home, quiet=as_json, deadline=deadline)
        elif store.location == NOWHERE:
            raise no_job_yet()
        else:
            sha = commit_id(commit)
            ended = _follow_commit(store, sha, pipeline, home, quiet=as_json, deadline=deadline)
        report_end(ended, as_json)


@app.command(hidden=True)
def runner(
    until_idle: Annotated[bool, typer.Option(help="Stop when no job is left.")] = False,
    with_hub: Annotated[bool, typer.Option(help="Also run a hub.")] = False,
) -> None:
    """Run the jobs of the job store, until this process is stopped. `pipeline up` starts this
    command. Runners on several machines need the same settings, with a `database_url` of Postgres,
    and the same `tokens.json`."""
    run_jobs(Home.find(), until_idle=until_idle, with_hub=with_hub)


def commit_id(name: str) -> str:
    """The full id of the commit `name`. `name` may be a full id, a short id, or a name such as
    HEAD. A full id is returned without a check. For any other name, git looks for the commit in the
    clone that contains the working folder.

    Raises PipelineError if git is not installed or finds no such commit.
    """
    if re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", name):
        return name
    ask = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{name}^{{commit}}"]
    try:
        found = subprocess.run(ask, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise PipelineError(
            f"--commit {name}: git is not installed; give the commit's full id"
        ) from None
    if found.returncode != 0:
        raise PipelineError(
            f"--commit {name}: git finds no such commit from this folder; change to a clone of the "
            "dataset, or give the commit's full id"
        )
    return found.stdout.strip()


def _follow_commit(
    store: JobStore,
    sha: str,
    pipeline: str | None,
    home: Home,
    *,
    quiet: bool,
    deadline: float | None,
) -> Job:
    """Show the job of the commit until the job has ended; returns the ended job. If this job failed
    and the pipeline has a later job for pushes, show the later job in the same way, and return it:
    it has trained on the head of the branch, so it covers the commit."""
    job = _arrived(store, sha, pipeline, home, deadline)
    while True:
        ended = follow_to_end(store, job, home, quiet=quiet, deadline=deadline)
        later = [
            each
            for each in store.list(pipeline=job.spec.pipeline, limit=NUM_WATCHED)
            if each.id > ended.id and not each.by_hand
        ]
        if ended.state != "ERROR" or ended.by_hand or not later:
            return ended
        job = later[-1]


def _arrived(
    store: JobStore, sha: str, pipeline: str | None, home: Home, deadline: float | None
) -> Job:
    give_up = time.monotonic() + ARRIVAL_SECONDS
    asked: dict[str, bool] = {}
    while (job := _job_of_commit(store, sha, pipeline, home, asked)) is None:
        if deadline is not None and time.monotonic() > deadline:
            raise timed_out(f"there is still no job for commit {sha[:8]}")
        if time.monotonic() > give_up:
            raise PipelineError(
                f"no push of commit {sha[:8]} has led to a job in {ARRIVAL_SECONDS:g} s; check "
                "that you pushed to the branch that the pipeline follows; `pipeline status` shows "
                "whether all services are up"
            )
        time.sleep(POLL_SECONDS)
    return job


def _job_of_commit(
    store: JobStore, sha: str, pipeline: str | None, home: Home, asked: dict[str, bool]
) -> Job | None:
    """The newest job to which a delivery of the commit has led, or which has trained on the commit.
    If there is none, the newest job that has trained on a later commit of the same history."""
    jobs = [job for job in store.of_commit(sha) if pipeline in (None, job.spec.pipeline)]
    if not jobs:
        started = store.list(pipeline=pipeline, limit=NUM_WATCHED)
        jobs = [job for job in started if _contains(home, sha, job, asked)]
    names = sorted({job.spec.pipeline or "" for job in jobs})
    if len(names) > 1:
        raise PipelineError(
            f"several pipelines have a job for commit {sha[:8]}: {', '.join(names)}; add "
            "--pipeline NAME"
        )
    return jobs[0] if jobs else None


def _contains(home: Home, sha: str, job: Job, asked: dict[str, bool]) -> bool:
    """Whether the job has trained on the commit or on a later one. `asked` has the answers so far:
    head → whether its history contains the commit."""
    head = None if job.spec.revisions is None else job.spec.revisions.new_sha
    if head is None or job.spec.pipeline is None:
        return False
    if head not in asked:
        tokens = load_tokens(home.tokens_file)
        cache_dir = home.snapshots_dir / job.spec.pipeline
        source = source_of_job(job, running_settings(home).hub_url, tokens, cache_dir)
        asked[head] = False
        with suppress(SnapshotError):  # the history cannot be read
            asked[head] = source.is_ancestor(sha, head)
    return asked[head]
