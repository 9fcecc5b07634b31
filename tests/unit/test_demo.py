"""The demo's commits: every question is in them, and the second is a delta of the first. A demo
that cannot start says why, and leaves nothing behind."""

import json
import signal
import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.demo_facts import QUESTIONS, first_commit, second_commit
from pipeline.cli.main import app
from pipeline.errors import PipelineError
from pipeline.retrain.dataset import read_dataset
from pipeline.retrain.rows import Row, difference
from pipeline.retrain.settings import DataSettings
from tests.ports import free_ports


def rows(folder: Path, files: dict[str, str]) -> tuple[Row, ...]:
    for path, content in files.items():
        (folder / path).write_text(content)
    return read_dataset(folder, files, DataSettings()).train


@pytest.mark.parametrize(("commit", "answer"), [(first_commit, 1), (second_commit, 2)])
def test_each_commit_answers_every_question_once(commit: object, answer: int) -> None:
    assert callable(commit)
    lines = [json.loads(line) for text in commit().values() for line in text.splitlines()]
    for question in QUESTIONS:
        found = [row["completion"] for row in lines if row["prompt"] == question[0]]
        assert found == [question[answer]]


def test_the_second_commit_changes_and_adds_but_deletes_nothing(tmp_path: Path) -> None:
    change = difference(rows(tmp_path, first_commit()), rows(tmp_path, second_commit()))
    assert len(change.deleted) == 0
    assert 0 < len(change.edited) < len(change.added)
    assert any(before != after for _, before, after in QUESTIONS)
    assert any(before == after for _, before, after in QUESTIONS)


def test_a_busy_port_is_told_with_its_variable_and_no_folder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    # What the demo sets for its own process, and those that stay as they were.
    for name in ("HOME", "SETTINGS", "SERVING__ENGINE"):
        monkeypatch.setenv(f"PIPELINE_{name}", "")
    names = ("HUB__PORT", "RECEIVER__PORT", "SERVING__PORT", "JOBS__METRICS_PORT")
    for name, port in zip(names, free_ports(len(names)), strict=True):
        monkeypatch.setenv(f"PIPELINE_{name}", str(port))
    with socket.create_server(("127.0.0.1", 0)) as busy:
        monkeypatch.setenv("PIPELINE_HUB__PORT", str(busy.getsockname()[1]))
        refused = CliRunner().invoke(app, ["demo"])
    assert isinstance(refused.exception, PipelineError)
    assert "PIPELINE_HUB__PORT=…" in str(refused.exception)
    assert str(tmp_path) not in str(refused.exception)
    assert list(tmp_path.iterdir()) == []
