"""Reporters: told every step, missing ones named before the training."""

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.retrain.errors import RetrainError
from pipeline.retrain.metrics import MetricsWriter, read_metrics
from pipeline.retrain.reporters import check_reporters, open_reporters


def test_a_reporter_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    check_reporters(())
    monkeypatch.setattr("pipeline.retrain.reporters.find_spec", lambda name: None)
    with pytest.raises(RetrainError, match="names wandb, which is not installed: pip install"):
        check_reporters(("wandb",))


def test_steps_and_evaluations_are_told_and_written(tmp_path: Path) -> None:
    told = []
    metrics = MetricsWriter(tmp_path / "metrics.jsonl")
    with metrics.reporting_to((lambda values, step: told.append((dict(values), step)),)):
        metrics.write("train", "step", step=1, steps=9, loss=2.0, learning_rate=0.1)
        metrics.write("train", "evaluation", step=1, steps=9, loss=3.0)
    metrics.write("train", "end", seconds=1.0)
    assert told == [
        ({"train/loss": 2.0, "train/learning_rate": 0.1}, 1),
        ({"held_out/loss": 3.0}, 1),
    ]
    assert len(read_metrics(tmp_path / "metrics.jsonl")[0]) == 3


PROGRAM = """
import sys
from pathlib import Path
from pipeline.retrain.reporters import open_reporters

def watch(event, arguments):
    if event == "socket.connect" and isinstance(arguments[1], tuple):
        address = arguments[1][0]
        if address not in ("127.0.0.1", "::1", "localhost"):
            print("reached for", address)

sys.addaudithook(watch)
reporters = open_reporters(
    (sys.argv[1],), folder=Path(sys.argv[2]), pipeline="facts", job_id="j000001"
)
with reporters as (report,):
    for step in map(int, sys.argv[3:]):
        report({"train/loss": 1.0 / step}, step)
"""


def report_in_a_process(name: str, folder: Path, *steps: int) -> None:
    """As a job does: both libraries keep to the settings that they were first imported with."""
    kept = ("WANDB", "TRACKIO", "HF_", "HOME")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(kept)}
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, name, str(folder), *map(str, steps)],
        env={**inherited, "HOME": str(home), "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not [path for path in home.rglob("*") if path.is_file()], "the home folder is a person's"


def test_trackio_stores_in_the_jobs_folder_and_goes_on_after_a_restart(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    folder = tmp_path / "job"
    folder.mkdir()
    report_in_a_process("trackio", folder, 1, 2)
    report_in_a_process("trackio", folder, 4)
    with closing(sqlite3.connect(folder / "trackio" / "facts.db")) as connection:
        rows = connection.execute("SELECT run_name, step, metrics FROM metrics ORDER BY step")
        found = [(name, step, json.loads(metrics)["train/loss"]) for name, step, metrics in rows]
        runs = connection.execute("SELECT count(DISTINCT run_id) FROM metrics").fetchone()
    assert found == [("j000001", 1, 1.0), ("j000001", 2, 0.5), ("j000001", 4, 0.25)]
    assert runs == (1,)


def test_wandb_is_offline_and_stores_in_the_jobs_folder(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    folder = tmp_path / "job"
    folder.mkdir()
    report_in_a_process("wandb", folder, 1, 2)
    (file,) = folder.glob("wandb/wandb/offline-run-*/run-*.wandb")
    # Its own format, which only its own server reads: records of names and numbers in JSON.
    told = file.read_bytes()
    assert b"train/loss" in told and b"0.5" in told


def test_tensorboard_leaves_its_events_in_the_jobs_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    names = ("tensorboard",)
    with open_reporters(names, folder=tmp_path, pipeline="facts", job_id="j1") as (report,):
        report({"train/loss": 1.5}, 3)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Scalars("train/loss")
    assert (event.step, event.value) == (3, 1.5)
