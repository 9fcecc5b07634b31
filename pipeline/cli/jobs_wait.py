"""`pipeline jobs wait`: waits until a job ends. The job may be named by the commit that was
pushed."""

import re
import subprocess
import time
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.job_access import JobArgument, LatestOption, find_job, no_job_yet, reading_store
from pipeline.cli.job_end import deadline_in, follow_to_end, report_end, timed_out
from pipeline.cli.options import JsonOption
from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from jobs.job import Job
    from jobs.store import JobStore

ARRIVAL_SECONDS = 30.0
"""How long after the push of a commit its job may take to appear."""
POLL_SECONDS = 0.1


def wait(
    job: JobArgument = None,
    latest: LatestOption = False,
    commit: Annotated[
        str | None,
        typer.Option(
            help="The job of a push. Name the push's newest commit by its id, or by HEAD in a "
            "clone of the dataset."
        ),
    ] = None,
    pipeline: Annotated[
        str | None,
        typer.Option(
            help="With --commit: the pipeline of the job, if several pipelines follow the dataset."
        ),
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Wait at most this many seconds.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Wait until a job ends. The exit codes are those of `jobs run`, and 124 after --timeout.

    Right after a push, use `--commit HEAD`, because `--latest` may still be the previous job.
    """
    home, deadline = Home.find(), deadline_in(timeout)
    if commit is not None and (job is not None or latest):
        raise PipelineError("name one job by its id, or use --latest, or --commit")
    with reading_store(home) as store:
        if commit is None:
            store, found = find_job(store, job, latest)
            ended = follow_to_end(store, found, home, quiet=as_json, deadline=deadline)
        elif store is None:
            raise no_job_yet()
        else:
            sha = commit_id(commit)
            ended = _follow_commit(store, sha, pipeline, home, quiet=as_json, deadline=deadline)
        report_end(ended, as_json)


def commit_id(name: str) -> str:
    """The full id of the commit with this id or name. A name, such as HEAD, is looked up in the git
    clone that you are in.

    Raises PipelineError.
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
            f"--commit {name}: this folder is not a git clone that has such a commit; change to a "
            "clone of the dataset, or give the commit's full id"
        )
    return found.stdout.strip()


def _follow_commit(
    store: "JobStore",
    sha: str,
    pipeline: str | None,
    home: Home,
    *,
    quiet: bool,
    deadline: float | None,
) -> "Job":
    """Follow the job that answers for the commit. If the job fails and another job takes over its
    commits, follow that job too."""
    job = _arrived(store, sha, pipeline, deadline)
    while True:
        ended = follow_to_end(store, job, home, quiet=quiet, deadline=deadline)
        newest = _job_of_commit(store, sha, job.spec.pipeline)
        if newest is None or newest.id == ended.id:
            return ended
        job = newest


def _arrived(store: "JobStore", sha: str, pipeline: str | None, deadline: float | None) -> "Job":
    give_up = time.monotonic() + ARRIVAL_SECONDS
    while (job := _job_of_commit(store, sha, pipeline)) is None:
        if deadline is not None and time.monotonic() > deadline:
            raise timed_out(f"there was no job for commit {sha[:8]}")
        if time.monotonic() > give_up:
            raise PipelineError(
                f"no push of commit {sha[:8]} has led to a job in {ARRIVAL_SECONDS:g} s; is the "
                "commit the newest one of a push to the branch that the pipeline follows? "
                "`pipeline status` shows whether everything is up"
            )
        time.sleep(POLL_SECONDS)
    return job


def _job_of_commit(store: "JobStore", sha: str, pipeline: str | None) -> "Job | None":
    jobs = [job for job in store.of_commit(sha) if pipeline in (None, job.spec.pipeline)]
    names = sorted({job.spec.pipeline or "" for job in jobs})
    if len(names) > 1:
        raise PipelineError(
            f"several pipelines have a job for commit {sha[:8]}: {', '.join(names)}; add "
            "--pipeline NAME"
        )
    return jobs[0] if jobs else None
