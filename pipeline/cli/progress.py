"""A bar that follows one retraining job: its stages and the training loss."""

import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from jobs.record import Job
from jobs.store import JobStore
from pipeline.journal import is_over
from pipeline.paths import Home

POLL_SECONDS = 0.1


def follow(store: JobStore, job_id: str, home: Home, console: Console) -> Job:
    """Show the job until it is over; returns how it ended."""
    with Progress(
        TextColumn("{task.description:>10}"),
        BarColumn(bar_width=32),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
        console=console,
    ) as progress:
        bars = {"waiting": progress.add_task("waiting", total=None, note=job_id)}
        last = "waiting"
        for job, events in _poll(store, job_id, home):
            for event in events:
                stage = event.stage
                if stage not in bars:
                    _finish(progress, bars[last])
                    bars[stage] = progress.add_task(stage, total=None, note="")
                    last = stage
                if event.event == "step":
                    progress.update(
                        bars[stage],
                        total=event.steps,
                        completed=event.step,
                        note=f"loss {event.loss:.3f}",
                    )
                elif event.event == "end":
                    _finish(progress, bars[stage])
            if is_over(job):
                _finish(progress, bars[last])
                return job
    raise AssertionError("a job that is polled is over sooner or later")


def _poll(store: JobStore, job_id: str, home: Home) -> Iterator[tuple[Job, list]]:
    from pipeline.retrain.metrics import read_metrics

    offset = 0
    file = home.jobs_dir / job_id / "metrics.jsonl"
    while True:
        # The job before its metrics: what it wrote before it ended is then never missed.
        job = store.get(job_id)
        events, offset = read_metrics(file, offset)
        yield job, events
        time.sleep(POLL_SECONDS)


def _finish(progress: Progress, bar) -> None:
    task = progress.tasks[bar]
    progress.update(bar, total=task.total or 1, completed=task.total or 1)
    progress.stop_task(bar)
