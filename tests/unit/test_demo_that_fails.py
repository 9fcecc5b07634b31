"""A demo that cannot start says why, and leaves nothing behind."""

import signal
import socket
import tempfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli.main import app
from pipeline.errors import PipelineError
from tests.ports import free_ports


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
