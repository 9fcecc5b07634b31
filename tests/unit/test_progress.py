"""Following a job: what is shown of it, and for how long each part of it took."""

import io
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from jobs.job import Job
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.cli.progress import follow_output, follow_stages
from pipeline.paths import Home
from pipeline.retrain.job import MetricsWriter, read_metrics
from tests.jobs_fixtures import claim


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path)
    home.jobs_dir.mkdir()
    return home


def shown(store: JobStore, job_id: str, home: Home, *, terminal: bool) -> list[str]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, width=80, highlight=False)
    follow_stages(store, job_id, home, console, deadline=time.monotonic())
    return [line.rstrip() for line in stream.getvalue().splitlines() if line.strip()]


def written(home: Home, job_id: str, *events: dict[str, Any]) -> None:
    """The metrics that the job has written so far."""
    folder = home.jobs_dir / job_id
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def started(store: JobStore) -> str:
    store.submit(JobSpec(command=("sleep", "100")))
    return claim(store).id


def test_a_command_that_runs_does_not_wait(home: Home) -> None:
    with JobStore.open(home.jobs_database) as store:
        job_id = started(store)
        lines = shown(store, job_id, home, terminal=True)
    assert any(re.search(r"\brunning\b", line) for line in lines), lines
    assert not any("train" in line for line in lines)


def test_the_answers_of_the_base_model_are_told_at_once_and_with_an_estimate(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    answered = {"stage": "measure", "event": "answered", "rows": 204}
    one_by_one = [
        {"time": now, "stage": "measure", "event": "start"},
        *({"time": now + at, "measured": at // 4, **answered} for at in (0, 8, 20, 400)),
        {"time": now + 816, "measured": 204, **answered},
        {"time": now + 820, "measured": 9, "rows": 9, "stage": "measure", "event": "measured"},
    ]
    words = "s  the base model answers:"
    assert lines_of_events(home, one_by_one, monkeypatch) == [
        f"   measure       0.0 {words} 0 of 204 prompts",
        f"   measure      20.0 {words} 5 of 204 prompts, about 13 min left",
        f"   measure     400.0 {words} 100 of 204 prompts, about 7 min left",
        f"   measure     816.0 {words} 204 of 204 prompts",
    ]


def test_a_job_behind_another_names_the_job_that_it_waits_for(
    home: Home, capsys: pytest.CaptureFixture[str]
) -> None:
    retraining = JobSpec(command=("true",), pipeline="notes")
    with JobStore.open(home.jobs_database) as store:
        store.submit(retraining, by_hand=True)
        training = claim(store)
        behind = store.submit(retraining, by_hand=True)
        follow_output(store, behind.id, home, io.BytesIO(), deadline=time.monotonic() + 0.3)
        assert capsys.readouterr().err == f"waits: {training.id} is running\n", "once"
        follow_output(store, behind.id, home, None, deadline=time.monotonic())
        assert capsys.readouterr().err == "", "--json"
        lines = shown(store, behind.id, home, terminal=False)
        assert len(lines) == 1 and lines[0].endswith(f"waits: {training.id} is running"), lines
        bar = "".join(shown(store, behind.id, home, terminal=True))
        assert f"waits: {training.id} is running" in bar
        store.finish(training.id, "me", None)
        store.claim("me", 60)
        assert not any("waits" in line for line in shown(store, behind.id, home, terminal=False))


@pytest.mark.parametrize("terminal", [True, False])
def test_stages_have_the_times_of_the_job_and_not_of_who_looks(home: Home, terminal: bool) -> None:
    with JobStore.open(home.jobs_database) as store:
        job_id = started(store)
        now = time.time()
        written(
            home,
            job_id,
            {"time": now, "stage": "train", "event": "start"},
            {"time": now, "stage": "train", "event": "step", "step": 2, "steps": 4, "loss": 1.5},
            {"time": now + 83.0, "stage": "train", "event": "end", "seconds": 83.0},
        )
        store.finish(job_id, "me", None)
        lines = shown(store, job_id, home, terminal=terminal)
    (train,) = [line for line in lines if "train" in line][-1:]
    assert "83.0 s" in train
    assert "loss 1.500" in train
    if not terminal:
        assert [line.split()[0] for line in lines] == ["waiting", "train"]


def lines_of_events(
    home: Home, one_by_one: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """What is printed without a terminal while a job writes these events, each at its time."""
    stream = io.StringIO()
    with JobStore.open(home.jobs_database) as store:
        job_id, get = started(store), store.get

        def get_after_one_more(job: str) -> Job:
            if one_by_one:
                written(home, job_id, one_by_one.pop(0))
            else:
                store.finish(job_id, "me", None)
            return get(job)

        monkeypatch.setattr(store, "get", get_after_one_more)
        follow_stages(store, job_id, home, Console(file=stream, width=80, highlight=False))
    return stream.getvalue().splitlines()[1:-1]


def test_without_a_terminal_a_long_stage_says_how_far_it_is_and_not_too_often(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    step = {"stage": "train", "event": "step", "steps": 90, "loss": 1.5}
    measured = {"stage": "evaluate", "event": "measured", "rows": 9}
    one_by_one = [
        {"time": now, "stage": "train", "event": "start"},
        *({"time": now + at, "step": at, **step} for at in (14, 16, 30, 31)),
        {"time": now + 60, "stage": "train", "event": "end"},
        *({"time": now + 60 + at, "measured": at, **measured} for at in (1, 8, 9)),
        {"time": now + 80, "measured": 9, **measured},
    ]
    assert lines_of_events(home, one_by_one, monkeypatch) == [
        "     train      16.0 s  step 16 of at most 90, loss 1.500",
        "     train      31.0 s  step 31 of at most 90, loss 1.500",
        "     train      60.0 s  loss 1.500",
        "  evaluate      19.0 s  9 of 9 rows",
    ]


def test_lines_are_read_once_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert read_metrics(path) == ((), 0)
    writer = MetricsWriter(path)
    writer.write("train", "start")
    writer.write("train", "step", step=1, steps=9, loss=2.5, tokens=100)
    first, offset = read_metrics(path)
    assert [metric.event for metric in first] == ["start", "step"]
    assert (first[1].step, first[1].loss, first[1].seconds) == (1, 2.5, None)
    with path.open("a") as file:
        file.write('{"time": 1, "stage": "train", "eve')
    assert read_metrics(path, offset) == ((), offset)


def test_a_restarted_job_goes_on_behind_a_torn_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"time": 1, "stage": "train", "event": "start"}\n{"time": 2, "sta')
    MetricsWriter(path).write("train", "step", step=3)
    metrics, offset = read_metrics(path)
    assert [metric.event for metric in metrics] == ["start", "step"]
    assert offset == path.stat().st_size
