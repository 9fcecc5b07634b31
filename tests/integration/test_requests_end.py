"""How requests end when something else does: clients that hang up, engines that die, full queues,
ports that are taken."""

import asyncio
import json
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from serving import answer as answering
from serving.admission import Admission
from serving.app import bind
from serving.engine import EngineError, Generation, Step
from serving.errors import ServingError
from serving.http.server import Server
from serving.settings import ServingSettings
from serving.weights.release_store import pending_release, set_current, set_pending
from tests.contract.engine_bench import swap
from tests.echo_engine import EchoEngine
from tests.jobs_fixtures import until
from tests.serving_fixtures import (
    echo_app,
    echo_release,
    running,
    server_process,
)

BODY = {"model": "answers", "prompt": "Hello", "max_tokens": 100, "ignore_eos": True}


class OneSlot(EchoEngine):
    """Computes one sequence at a time; the others are queued."""

    def __init__(self, *, step_seconds: float) -> None:
        super().__init__(step_seconds=step_seconds)
        self._slot = asyncio.Semaphore(1)

    async def generate(self, release_id: str, generation: Generation) -> AsyncGenerator[Step, None]:
        async with self._slot, aclosing(super().generate(release_id, generation)) as steps:
            async for step in steps:
                yield step


@dataclass
class Slow:
    url: str
    engine: EchoEngine
    release_id: str
    admission: Admission

    @property
    def num_running(self) -> int:
        return self.engine.num_running[self.release_id]

    def is_idle(self) -> bool:
        return self.admission.num_in_flight == 0


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Slow]:
    pipeline_dir = tmp_path / "answers"
    release = echo_release(pipeline_dir, 1)
    set_current(pipeline_dir, release.id)
    engine = EchoEngine(step_seconds=0.05)
    app = echo_app(pipeline_dir, engine, max_queue=2)
    with running(app) as url:
        yield Slow(url, engine, release.id, app.state.admission)


def metric(url: str, name: str) -> str:
    """Its line."""
    text = httpx.get(f"{url}/metrics").text
    return next(line for line in text.splitlines() if line.startswith(name))


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_that_is_hung_up_frees_its_slots(slow: Slow, n: int) -> None:
    body = {**BODY, "stream": True, "n": n}
    with httpx.stream("POST", f"{slow.url}/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        next(line for line in lines if line.startswith("data: "))
        assert slow.num_running == n
    until(lambda: slow.num_running == 0)
    until(slow.is_idle)


@pytest.mark.parametrize("n", [1, 2])
def test_a_whole_answer_that_is_hung_up_frees_its_slots(slow: Slow, n: int) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{slow.url}/v1/completions", json={**BODY, "n": n}, timeout=0.3)
    until(lambda: slow.num_running == 0)
    until(slow.is_idle)


def test_one_request_too_many_is_told_to_come_back(slow: Slow) -> None:
    def ask() -> None:
        httpx.post(f"{slow.url}/v1/completions", json={**BODY, "max_tokens": 20})

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: slow.num_running == 2)
    answer = httpx.post(f"{slow.url}/v1/completions", json=BODY)
    assert answer.status_code == 429
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "queue_full"
    for thread in threads:
        thread.join()
    assert httpx.post(f"{slow.url}/v1/completions", json={**BODY, "max_tokens": 1}).is_success


def test_who_is_queued_waits_until_the_first_token(tmp_path: Path) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    with (
        running(echo_app(tmp_path, OneSlot(step_seconds=0.1))) as url,
        ThreadPoolExecutor(3) as pool,
        httpx.Client(base_url=url, timeout=30) as http,
    ):

        def ask(**change: object) -> httpx.Response:
            return http.post("/v1/completions", json={**BODY, "max_tokens": 2, **change})

        def is_waiting(sequences: int) -> bool:
            return metric(url, "vllm:num_requests_waiting{").endswith(f" {sequences}.0")

        with http.stream("POST", "/v1/completions", json={**BODY, "stream": True}) as stream:
            lines = stream.iter_lines()
            next(line for line in lines if line.startswith("data: "))
            assert is_waiting(0)
            assert metric(url, "vllm:num_requests_running").endswith(" 1.0")
            queued = [pool.submit(ask), pool.submit(ask, n=2)]
            until(lambda: is_waiting(3))
            # Who ends in another way waits no longer: refused, or hung up.
            assert ask(max_tokens=1000).status_code == 400
            assert is_waiting(3)
            gone = pool.submit(httpx.post, f"{url}/v1/completions", json=BODY, timeout=3)
            until(lambda: is_waiting(4))
            with pytest.raises(httpx.ReadTimeout):
                gone.result()
            until(lambda: is_waiting(3))
        assert all(answer.result().is_success for answer in queued)
        until(lambda: is_waiting(0))


@pytest.mark.parametrize("fails", [False, True])
def test_a_stream_that_waits_in_the_queue_has_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    monkeypatch.setattr(answering, "HEADER_SECONDS", 0.05)
    monkeypatch.setattr(answering, "COMMENT_SECONDS", 0.05)
    release = echo_release(tmp_path, 1)
    set_current(tmp_path, release.id)
    engine = EchoEngine()
    with running(echo_app(tmp_path, engine)) as url:
        assert httpx.get(f"{url}/health").is_success  # the probe has ended
        gate = engine.hang["generate"] = asyncio.Event()
        body = {**BODY, "max_tokens": 2, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=30) as stream:
            assert stream.headers["x-model-release"] == release.id
            lines = stream.iter_lines()
            assert [next(lines) for _ in range(4)] == [": waiting", "", ": waiting", ""]
            if fails:
                engine.fail["generate"] = EngineError("out of order")
            gate._loop.call_soon_threadsafe(gate.set)  # type: ignore[attr-defined]
            events = [line for line in lines if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert ("out of order" in events[0]) == fails


def test_a_stream_that_waits_between_two_tokens_sends_comments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answering, "COMMENT_SECONDS", 0.05)
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    body = {**BODY, "max_tokens": 8, "stream": True}
    with running(echo_app(tmp_path, EchoEngine(step_seconds=0.2))) as url:
        lines = httpx.post(f"{url}/v1/completions", json=body).text.splitlines()
    events = [number for number, line in enumerate(lines) if line.startswith("data: ")]
    assert ": waiting" in lines[events[0] : events[-2]]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_an_engine_that_dies_at_once_is_503(slow: Slow, stream: bool, n: int) -> None:
    slow.engine.fail["generate"] = EngineError("gone")
    answer = httpx.post(f"{slow.url}/v1/completions", json={**BODY, "stream": stream, "n": n})
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "unavailable"
    assert slow.is_idle()


def test_an_engine_that_dies_later_ends_the_stream_with_an_error(slow: Slow) -> None:
    with httpx.stream(
        "POST", f"{slow.url}/v1/completions", json={**BODY, "stream": True}
    ) as stream:
        lines = (line[6:] for line in stream.iter_lines() if line.startswith("data: "))
        assert json.loads(next(lines))["choices"]
        slow.engine.fail["step"] = EngineError("gone")
        rest = list(lines)
    assert json.loads(rest[-2])["error"]["type"] == "service_unavailable"
    assert rest[-1] == "[DONE]"


def test_a_busy_port_says_which_and_what_to_do() -> None:
    with bind(ServingSettings(port=0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServingError, match=rf"127\.0\.0\.1:{port}: .* choose another address"):
            bind(ServingSettings(port=port))


def test_answers_are_not_held_back_for_an_acknowledgement(tmp_path: Path) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    with bind(ServingSettings(port=0)) as listener:
        server = Server(echo_app(tmp_path), shutdown_seconds=10, lifespan="on")
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            with httpx.Client() as client:
                client.get(f"http://127.0.0.1:{listener.getsockname()[1]}/live", timeout=30)
                [connection] = server.server_state.connections
                accepted = connection.transport.get_extra_info("socket")
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        finally:
            server.should_exit = True
            thread.join()


def test_localhost_is_this_machine_only_and_its_ipv4_address() -> None:
    with bind(ServingSettings(host="localhost", port=0)) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"


def test_the_world_is_let_in_with_a_key_only() -> None:
    with pytest.raises(ServingError, match="api_key"):
        bind(ServingSettings(host="0.0.0.0", port=0))
    bind(ServingSettings(host="0.0.0.0", port=0, api_key="key")).close()  # type: ignore[arg-type]
    with pytest.raises(ServingError, match="no address"):
        bind(ServingSettings(host="nowhere.invalid", port=0, api_key="key"))  # type: ignore[arg-type]


SERVE = """
import sys
from pathlib import Path
from serving.app import serve
from serving.settings import ServingSettings
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_app
serve(echo_app(Path(sys.argv[1]), EchoEngine(step_seconds=0.1)), ServingSettings(port=0))
"""


def test_a_server_process_swaps_pending_in_and_lets_its_last_answer_end_on_sigterm(
    tmp_path: Path,
) -> None:
    pipeline_dir = tmp_path / "answers"
    first, second = echo_release(pipeline_dir, 1), echo_release(pipeline_dir, 2)
    set_current(pipeline_dir, first.id)
    set_pending(pipeline_dir, second.id)
    env = {**os.environ, "PYTHONPATH": os.getcwd()}
    with server_process("-c", SERVE, str(pipeline_dir), env=env) as (url, process):
        # The port listens before the start is over, and answers once it is.
        with httpx.Client(base_url=url, timeout=30) as http:
            found = swap(http, second.id).json()
        assert found["result"] == "live" and found["previous"] == second.id
        assert pending_release(pipeline_dir) is None
        body = {**BODY, "max_tokens": 20, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            assert list(lines)[-2:] == ["data: [DONE]", ""]
        assert process.wait(timeout=20) == -signal.SIGTERM
