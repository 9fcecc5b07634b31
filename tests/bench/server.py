"""Servers as a user starts them: ours by `pipeline serve`, vLLM by its own module; and what clients
ask of them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil

from tests.bench.networks import CONTEXT, Published
from tests.ports import free_ports
from tests.stack_fixtures import end_with_this_process

ROOT = Path(__file__).parents[2]
PIPELINE = "answers"
START_SECONDS, END_SECONDS = 400.0, 60.0
_IDLE_SECONDS = 60
KV_CACHE_BYTES = 2 << 30
"""Of vLLM's own server: as many as our default."""
# Servers close an unused connection after 5 s. A request that is sent at that moment would fail.
_NO_LIMITS = httpx.Limits(max_connections=None, keepalive_expiry=2.0)
ServerName = Literal["torch", "vllm", "vllm-own"]
"""Our server with its embedded engine, our server with vLLM, and vLLM's own server."""


@dataclass(frozen=True, kw_only=True)
class Server:
    url: str
    pid: int
    admin_token: str
    """Empty for vLLM's own."""
    log: Path
    start_seconds: float
    """From the start of the process to its first token."""
    http: httpx.Client
    """One for all requests, as clients have: to make one costs as much as many a token."""

    def ask(self, prompt: list[int], max_tokens: int, **body: Any) -> dict[str, Any]:
        """One greedy answer of exactly so many tokens."""
        answer = self.http.post("/v1/completions", json=request_body(prompt, max_tokens, **body))
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        if found["usage"]["completion_tokens"] != max_tokens:
            raise RuntimeError(f"asked for {max_tokens} tokens: {found['usage']}")
        return found

    def stream(self, prompt: list[int], max_tokens: int, on_event: Callable[[], None]) -> None:
        """The same as a stream; tells of each event that has a text."""
        body = request_body(prompt, max_tokens, stream=True)
        with self.http.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    on_event()

    def swap(self, release_id: str) -> dict[str, Any]:
        """The swap's result; a RuntimeError unless it is live."""
        answer = self.http.post(
            "/admin/swap",
            json={"release": release_id},
            headers={"Authorization": f"Bearer {self.admin_token}"},
        )
        found: dict[str, Any] = answer.json()
        if found.get("result") != "live":
            raise RuntimeError(f"the swap ended as {found}\n{self.log.read_text()[-2000:]}")
        return found

    def reload_weights(self, folder: Path) -> float:
        """vLLM's own way, by a route of its development mode; its seconds."""
        started = time.perf_counter()
        answer = self.http.post(
            "/collective_rpc",
            json={"method": "reload_weights", "kwargs": {"weights_path": str(folder)}},
        )
        answer.raise_for_status()
        return time.perf_counter() - started

    def processes(self) -> list[int]:
        """Its own and all that it started."""
        return _descendants(self.pid)


def wait_until_idle(*servers: Server) -> None:
    """Wait until these servers do not compute. vLLM's worker spins for about a second after its
    last answer, and so takes a core from the server whose turn is next. Raises TimeoutError."""
    processes = [psutil.Process(pid) for server in servers for pid in server.processes()]
    deadline = time.perf_counter() + _IDLE_SECONDS
    used = _cpu_seconds(processes)
    while time.perf_counter() < deadline:
        time.sleep(0.2)
        before, used = used, _cpu_seconds(processes)
        if used - before <= 0.01:
            return
    raise TimeoutError(f"the servers still compute after {_IDLE_SECONDS} s without a request")


def _cpu_seconds(processes: list[psutil.Process]) -> float:
    found = 0.0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has ended
            found += sum(process.cpu_times()[:2])
    return found


def request_body(prompt: list[int], max_tokens: int, **body: Any) -> dict[str, Any]:
    return {
        "model": PIPELINE,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        **body,
    }


@contextmanager
def serving(
    name: ServerName,
    release: Published,
    home: Path,
    pipeline: str = PIPELINE,
    dtype: str = "float32",
    context: int = CONTEXT,
    compiles: bool = True,
) -> Iterator[Server]:
    """A server in a process of its own, once it has answered with a token. `dtype`, `context` and
    `compiles` are told to vLLM's own, and ours takes the first two from the release."""
    (port,) = free_ports(1)
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPELINE_HOME": str(home),
        "PIPELINE_SETTINGS": str(home / "pipeline.toml"),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    # The Makefile sets it for tests that train side by side. A user's server does not have it, and
    # each step of a server would take longer with it.
    environment.pop("GOMP_SPINCOUNT", None)
    if name == "vllm-own":
        # Tokenizer and texts as in ours, so that both do the same work per token.
        command = [
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(release.folder), "--served-model-name", PIPELINE),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--dtype", dtype, "--max-model-len", str(context)),
            *("--kv-cache-memory-bytes", str(KV_CACHE_BYTES), "--generation-config", "vllm"),
            *(() if compiles else ("--enforce-eager",)),
        ]
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    else:
        home.mkdir(parents=True, exist_ok=True)
        (home / "pipeline.toml").write_text(
            f'[[pipelines]]\nname = "{pipeline}"\ndataset = "local/{pipeline}"\n'
        )
        command = [
            *(sys.executable, "-m", "pipeline", "serve", release.release_id),
            *("--engine", name, "--port", str(port)),
        ]
    log = home / f"{name}.log"
    started = time.perf_counter()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdout=stream,
            stderr=stream,
            preexec_fn=end_with_this_process,
        )
    tokens = home / "tokens.json"
    url = f"http://127.0.0.1:{port}"
    try:
        while not _has_answered(url, pipeline):
            if process.poll() is not None or time.perf_counter() - started > START_SECONDS:
                raise RuntimeError(f"{name} does not start:\n{log.read_text()[-4000:]}")
            time.sleep(0.02)
        seconds = time.perf_counter() - started
        with httpx.Client(base_url=url, timeout=600, limits=_NO_LIMITS, trust_env=False) as http:
            yield Server(
                url=url,
                pid=process.pid,
                admin_token="" if name == "vllm-own" else json.loads(tokens.read_bytes())["admin"],
                log=log,
                start_seconds=seconds,
                http=http,
            )
    finally:
        _end(process)


def pipeline_dir(home: Path) -> Path:
    return home / "releases" / PIPELINE


def _has_answered(url: str, model: str) -> bool:
    body = request_body([1, 2, 3], 1, model=model)
    try:
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600)
    except httpx.TransportError:
        return False
    return answer.is_success


def _end(process: "subprocess.Popen[bytes]") -> None:
    """A server that does not end costs its time, not the figures that were measured on it."""
    left = _descendants(process.pid)
    process.terminate()
    try:
        process.wait(END_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{process.args!r} did not end in {END_SECONDS:g} s", file=sys.stderr)
        process.kill()
        process.wait()
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                found += map(int, children.read_text().split())
            except OSError:  # the thread, or the process, is gone
                continue
    return found
