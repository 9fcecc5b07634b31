"""What a stack refuses before it starts anything, and while it starts."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from jobs.process import identify
from pipeline.cli.status import status_report
from pipeline.cli.up import _detach, down
from pipeline.doctor.checks import check_services
from pipeline.doctor.facts import Facts
from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.settings import load_settings
from pipeline.stack.record import Child, StackRecord, running_settings
from pipeline.stack.services import Service, check_port, choose, services_of
from pipeline.stack.supervisor import Stack
from tests.ports import free_port


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of the settings."""
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    return tmp_path / "pipeline.toml"


@pytest.mark.parametrize("table", ["serving", "receiver"])
def test_a_stack_needs_ports_that_its_parts_can_find(table: str, file: Path) -> None:
    file.write_text(f"[{table}]\nport = 0\n")
    with pytest.raises(PipelineError, match=rf"port = 0 under \[{table}\]"):
        services_of(load_settings())


def test_a_busy_port_is_told_with_the_service_by_its_words() -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = busy.getsockname()[1]
        service = Service(
            name="serve",
            arguments=("serve",),
            url=f"http://127.0.0.1:{port}",
            port_setting="this or that",
        )
        with pytest.raises(PipelineError) as refused:
            check_port(service)
    assert f"port {port} for the completion server cannot" in str(refused.value)
    assert "or set another port: this or that" in str(refused.value)


def test_each_port_is_told_with_where_it_is_set(file: Path) -> None:
    own = '[[pipelines]]\nname = "b"\ndataset = "o/d"\nport = 9000\n'
    file.write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n' + own)
    assert {each.name: each.port_setting for each in services_of(load_settings())} == {
        "hub": "PIPELINE_HUB__PORT=…, or `port` under [hub]",
        "serve-a": "PIPELINE_SERVING__PORT=…, or `port` under [serving]",
        "serve-b": "`port` of b under [[pipelines]]",
        "gateway": "PIPELINE_SERVING__PORT=…, or `port` under [serving]",
        "runner": None,
        "receiver": "PIPELINE_RECEIVER__PORT=…, or `port` under [receiver]",
    }


def test_several_pipelines_have_one_address(file: Path) -> None:
    one, two = (f'[[pipelines]]\nname = "{name}"\ndataset = "o/d"\n' for name in "ab")

    def urls(text: str) -> dict[str, str | None]:
        file.write_text(text)
        services = services_of(load_settings())
        return {
            each.name: each.url
            for each in services
            if "serve" in each.name or each.name == "gateway"
        }

    assert urls(one) == {"serve": "http://127.0.0.1:8000"}, "no hop"
    assert urls(one + two) == {
        "serve-a": "http://127.0.0.1:8001",
        "serve-b": "http://127.0.0.1:8002",
        "gateway": "http://127.0.0.1:8000",
    }
    with pytest.raises(PipelineError, match="port 8000 is set for both"):
        urls(one + two + "port = 8000\n")
    both = "port 8001 is set for both the completion server of a and the completion server of b"
    with pytest.raises(PipelineError, match=both):
        urls(one + two + "port = 8001\n")


def test_the_addresses_of_a_running_stack_with_a_gateway(file: Path) -> None:
    """The stack was started with other ports than this shell knows."""
    file.write_text("".join(f'[[pipelines]]\nname = "{n}"\ndataset = "o/d"\n' for n in "ab"))
    process = identify(os.getpid())
    assert process is not None
    ports = {"gateway": 9000, "serve-a": 9001, "serve-b": 9002}
    running = [
        Child(
            name=name,
            process=process,
            url=f"http://127.0.0.2:{port}",
            pipeline=name.partition("-")[2] or None,
        )
        for name, port in ports.items()
    ]
    for order in (running, running[::-1]):
        record = StackRecord(process=process, started_at=0, is_ready=True, children=tuple(order))
        Home(file.parent).stack_file.write_text(record.model_dump_json())
        found = running_settings(Home(file.parent))
        assert found.gateway_url == "http://127.0.0.2:9000"
        assert [found.server_url(each) for each in found.pipelines] == [
            "http://127.0.0.2:9001",
            "http://127.0.0.2:9002",
        ]


def test_a_second_stack_leaves_the_log_of_the_first_as_it_is(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.log_file("up").parent.mkdir()
    home.log_file("up").write_text("lines of the first\n")
    stack = Stack(home, [])
    stack.start()
    try:
        with pytest.raises(PipelineError, match="a stack is already up"):
            _detach(home)
        assert home.log_file("up").read_text() == "lines of the first\n"
    finally:
        stack.stop()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a process is suspended")
def test_status_says_that_the_stack_is_suspended_and_down_stops_it(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path))
    up = subprocess.Popen(["sleep", "600"])
    try:
        process = identify(up.pid)
        assert process is not None
        # The stack may be that of `pipeline jobs run`, which is never ready.
        record = StackRecord(process=process, started_at=0, is_ready=False)
        Home(tmp_path).stack_file.write_text(record.model_dump_json())
        up.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, up.pid, os.WSTOPPED | os.WNOWAIT)
        advice = f"let it continue: kill -CONT {up.pid}"
        [notice] = status_report(Home(tmp_path), load_settings())["notices"]
        assert (
            notice.startswith(f"stack: the stack (process {up.pid}) is suspended")
            and advice in notice
        )
        found = check_services(Facts(Home(tmp_path), load_settings()))
        assert [each.check for each in found] == ["stack"]
        down()
    finally:
        up.kill()
        up.wait()


def test_a_service_that_must_be_restarted_is_not_ready(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stack.supervisor.http_probe", lambda url: lambda seconds: "dead")
    url = f"http://127.0.0.1:{free_port()}"
    stack = Stack(Home(tmp_path), [Service(name="hub", arguments=("--help",), url=url)])
    with pytest.raises(PipelineError, match=r"hub answered .* must be restarted; its log: .*hub"):
        stack.start()


def test_a_part_of_the_stack_is_chosen_and_unknown_names_get_the_list(file: Path) -> None:
    file.write_text('[[pipelines]]\nname = "a"\ndataset = "o/d"\n')
    services = services_of(load_settings())
    assert [each.name for each in choose("receiver,hub", services)] == ["hub", "receiver"]
    with pytest.raises(PipelineError, match=r"hubb.*choose from hub, serve, runner, receiver"):
        choose("hubb", services)
