"""A stack whose services hang: each is seen by its own work, killed and started again."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pipeline.errors import PipelineError
from pipeline.logs import MAX_BYTES
from pipeline.paths import Home, settings_file
from pipeline.settings import load_settings
from pipeline.stack.record import Child, read_stack
from pipeline.stack.services import RUNNER, Answer, ChildWatch, hub_service, services_of
from pipeline.stack.supervisor import Stack
from tests.jobs_fixtures import until
from tests.ports import free_ports
from tests.stack_fixtures import (
    workplace,
)

__all__ = ["workplace"]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Home]:
    hub, metrics = free_ports(2)
    for name, value in {
        "PIPELINE_HOME": str(tmp_path / ".pipeline"),
        "PIPELINE_SETTINGS": str(tmp_path / "pipeline.toml"),
        "PIPELINE_HUB__PORT": str(hub),
        "PIPELINE_JOBS__METRICS_PORT": str(metrics),
        "PIPELINE_JOBS__PRELOAD": "[]",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }.items():
        monkeypatch.setenv(name, value)
    yield Home.find()


def child(home: Home, name: str) -> Child:
    record = read_stack(home)
    assert record is not None
    return next(child for child in record.children if child.name == name)


def has_answered(stack: Stack, name: str) -> bool:
    watch = stack._running[name].watch
    return watch is not None and watch._has_answered


@pytest.mark.parametrize("name", ["hub", "runner"])
def test_a_stopped_service_is_killed_and_started_again(name: str, home: Home) -> None:
    service = {"hub": hub_service(load_settings()), "runner": RUNNER}[name]
    stack = Stack(home, [service], hang_seconds=0.9)
    stack.start()
    try:
        before, events = child(home, name).process, list[str]()
        assert before is not None
        log = make_long(home.log_file(name))
        events += stack.check_services()  # watches from now on
        assert has_been_rotated(log)
        until(lambda: has_answered(stack, name))
        os.kill(before.pid, signal.SIGSTOP)

        def is_said_to_be_silent() -> bool:
            events.extend(stack.check_services())
            return child(home, name).is_silent

        def is_up_again() -> bool:
            events.extend(stack.check_services())
            return child(home, name).process not in (None, before)

        until(is_said_to_be_silent)
        until(is_up_again)
        assert child(home, name).num_restarts == 1
        assert child(home, name).last_end == "was killed because it did not answer for 0.9 s"
        assert f"killing {name}, because it did not answer for 0.9 s" in events[0]
        assert events[-1] == f"{name} is up again"
        if service.url is not None:
            url = service.url
            until(lambda: _answers(f"{url}/live"))
    finally:
        stack.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url).json() == {"status": "ok"}
    except httpx.HTTPError:
        return False


def test_a_service_that_cannot_be_started_is_tried_again_while_the_others_stay_up(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.stack.supervisor.RESTART_SECONDS", (0.05,))
    stack = Stack(home, [hub_service(load_settings()), RUNNER])
    stack.start()
    stack.mark_ready()
    try:
        hub, runner = child(home, "hub").process, child(home, "runner").process
        assert hub is not None
        log, events = home.log_file("hub"), list[str]()
        log.rename(log.with_suffix(".old"))
        log.mkdir()  # cannot be opened for writing
        os.kill(hub.pid, signal.SIGKILL)

        def check() -> bool:
            events.extend(stack.check_services())
            return stack._running["hub"].restarts >= 3

        until(check)
        assert [event for event in events if "could not be started: " in event] == events[1:]
        assert len(events) == 2 and "Is a directory" in events[1], events
        assert "Is a directory" in str(child(home, "hub").last_end)
        log.rmdir()
        until(lambda: check() and events[-1] == "hub is up again")
        assert child(home, "hub").num_restarts == 1
        assert child(home, "runner").process == runner
    finally:
        stack.stop()


def test_the_log_of_up_stays_small(home: Home) -> None:
    log = make_long(home.log_file("up"))
    Stack(home, []).check_services()
    assert has_been_rotated(log)


def test_a_service_that_comes_back_has_the_settings_of_the_start(home: Home) -> None:
    file = settings_file()
    file.write_text("[hub]\nkeep_deliveries_days = 7\n")
    service = hub_service(load_settings())
    stack = Stack(home, [service])
    stack.start()
    try:
        assert home.settings_copy.read_text() == file.read_text()
        assert home.settings_copy.stat().st_mode & 0o777 == 0o600
        file.write_text("not TOML [")
        hub = child(home, "hub").process
        assert hub is not None
        os.kill(hub.pid, signal.SIGKILL)
        events = list[str]()

        def is_back() -> bool:
            events.extend(stack.check_services())
            assert not any("exit code" in event for event in events), events
            return "hub is up again" in events and _answers(f"{service.url}/live")

        until(is_back)
    finally:
        stack.stop()
    assert not home.settings_copy.exists()


def test_a_damaged_record_is_written_again(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.stack.supervisor.FILES_SECONDS", 0.0)
    stack = Stack(home, [])
    stack.start()
    try:
        stack.mark_ready()
        before = read_stack(home)
        assert before is not None
        home.stack_file.unlink()
        stack.check_services()
        assert read_stack(home) == before
        home.stack_file.write_text('{"process": ')
        stack.check_services()
        assert read_stack(home) == before
    finally:
        stack.stop()


def make_long(log: Path) -> Path:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        file.truncate(MAX_BYTES + 1)
    return log


def has_been_rotated(log: Path) -> bool:
    older = log.with_name(f"{log.name}.1")
    return log.stat().st_size < MAX_BYTES < older.stat().st_size


class Clock:
    """Takes the place of the module `time`: the time passes only while somebody sleeps."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_start_tells_that_it_waits_and_ends_after_the_services_own_time(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("pipeline.stack.supervisor.time", clock)
    monkeypatch.setattr(
        "pipeline.stack.supervisor.http_probe", lambda url: lambda seconds: "silent"
    )
    told: list[str] = []
    service = replace(hub_service(load_settings()), start_seconds=35)
    with pytest.raises(PipelineError, match=r"hub did not answer on .* within 35 s; its log: "):
        Stack(home, [service]).start(told.append)
    log = home.log_file("hub")
    assert told == [
        f"hub        is starting: {waited} s of at most 35 s (log: {log})"
        for waited in (10, 20, 30)
    ]
    assert 35 < clock.now < 35.1


def test_a_server_may_start_as_long_as_its_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pipeline.toml"
    monkeypatch.setenv("PIPELINE_SETTINGS", str(file))
    text = '[serving]\nengine = "{}"\n[[pipelines]]\nname = "a"\ndataset = "o/d"\n'
    found = {}
    for engine in ("torch", "vllm"):
        file.write_text(text.format(engine))
        services = services_of(load_settings())
        found[engine] = {each.name: each.start_seconds for each in services}
    assert found["vllm"] == {"hub": 60, "serve": 60 + 300, "runner": 60, "receiver": 60}
    assert found["torch"]["serve"] == 60 + 600


def test_a_service_that_says_it_is_dead_is_not_waited_for() -> None:
    watch = ChildWatch(lambda seconds: "dead", start_seconds=600, hang_seconds=60)
    try:
        until(lambda: watch.kill_reason is not None)
        assert watch.kill_reason == "it answered that it must be restarted"
    finally:
        watch.stop()


def test_time_in_which_the_watching_process_was_away_does_not_count() -> None:
    answers: Iterator[Answer] = iter(["works", "silent"])
    is_known = threading.Event()
    kill_reasons: list[str | None] = []

    def probe(seconds: float) -> Answer:
        is_known.wait()
        kill_reasons.append(watch.kill_reason)
        answer = next(answers, "works")
        if answer == "silent":
            time.sleep(10 * seconds)  # as if this process had been stopped meanwhile
        return answer

    watch = ChildWatch(probe, start_seconds=0.6, hang_seconds=0.6)
    is_known.set()
    try:
        until(lambda: len(kill_reasons) > 3)
        assert set(kill_reasons) == {None}
    finally:
        watch.stop()
