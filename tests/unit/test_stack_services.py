"""What a stack refuses before it starts anything."""

import socket
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.settings import load_settings
from pipeline.stack import Service, _check_port, services_of


@pytest.mark.parametrize("table", ["serving", "receiver"])
def test_a_stack_needs_ports_that_its_parts_can_find(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    monkeypatch.setenv(f"PIPELINE_{table.upper()}__PORT", "0")
    with pytest.raises(PipelineError, match=rf"port = 0 under \[{table}\]"):
        services_of(load_settings())


def test_a_busy_port_is_told_with_the_service_by_its_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        service = Service(
            name="serve", arguments=("serve",), url=f"http://127.0.0.1:{port}", port_option="port"
        )
        with pytest.raises(PipelineError, match=f"port {port} for the completion server cannot"):
            _check_port(service)
