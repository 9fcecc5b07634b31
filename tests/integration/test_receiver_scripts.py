"""Receivers as users write them: scripts, started by their end or by `launch()`, over HTTP."""

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from receiver.errors import AddressUnavailable
from receiver.webhooks_server import WebhooksServer
from tests.ports import free_port
from tests.receiver_payloads import dataset_update
from tests.receiver_scripts import ROOT, on_port, running

# What fails in an exit handler: worker threads, name resolution, an asynchronous client.
ASYNC_SCRIPT = """
import asyncio, os, threading
import httpx
from receiver.server import webhook_endpoint, WebhookPayload

@webhook_endpoint
async def at_work(payload: WebhookPayload):
    in_thread = await asyncio.to_thread(threading.current_thread)
    await asyncio.get_running_loop().getaddrinfo("localhost", 80)
    async with httpx.AsyncClient() as client:
        health = await client.get(os.environ["ITSELF"] + "/health")
    return {"in_thread": in_thread is not threading.main_thread(), "health": health.json()}

@webhook_endpoint
def in_a_thread(payload: WebhookPayload):
    return threading.current_thread() is not threading.main_thread()
"""

OWN_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
VERSIONS = [
    pytest.param(version, marks=[] if version == OWN_VERSION else [pytest.mark.slow])
    # Since 3.12, an exit handler can start no thread.
    for version in sorted({OWN_VERSION, "3.13"})
]


@pytest.fixture(scope="session", params=VERSIONS)
def python(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter of that release, with what the package needs; skips where there is none."""
    if request.param == OWN_VERSION:
        return sys.executable
    by_pyenv = sorted(Path.home().glob(f".pyenv/versions/{request.param}.*/bin/python"))
    for candidate in filter(None, [shutil.which(f"python{request.param}"), *map(str, by_pyenv)]):
        folder = tmp_path_factory.mktemp(f"python{request.param}")
        # A name on the PATH may be a shim of a release that is not there.
        if subprocess.run([candidate, "-m", "venv", folder], capture_output=True).returncode == 0:
            python = folder / "bin" / "python"
            needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
            subprocess.run([python, "-m", "pip", "install", "--quiet", *needed], check=True)
            return str(python)
    pytest.skip(f"no Python {request.param} here")


def test_the_end_of_the_script_starts_the_server(tmp_path: Path, python: str) -> None:
    port = free_port()
    code = on_port(ASYNC_SCRIPT, port) + "\nprint('the last line ran')\n"
    with running(tmp_path, code, python=python, ITSELF=f"http://127.0.0.1:{port}") as (
        url,
        printed,
        process,
    ):
        assert printed[0] == "the last line ran"
        answer = httpx.post(f"{url}/webhooks/at_work", json=dataset_update(), timeout=30)
        assert answer.json() == {"in_thread": True, "health": {"status": "ok"}}
        answer = httpx.post(f"{url}/webhooks/in_a_thread", json=dataset_update(), timeout=30)
        assert answer.json() is True
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_launch_in_the_script_starts_it_once(tmp_path: Path) -> None:
    code = f"{SLOW_SCRIPT}\nslow.launch(server_port=0)\nprint('after', flush=True)\n"
    with running(tmp_path, code) as (url, _, process):
        assert httpx.get(url).status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        rest = process.stdout.read()
        assert process.wait(30) == 0
    assert rest == "after\n", "the script goes on, and its end starts nothing again"


def test_a_script_that_ends_in_sys_exit_starts_the_server_too(tmp_path: Path, python: str) -> None:
    code = on_port(ASYNC_SCRIPT, free_port()) + "\nimport sys\nsys.exit(0)\n"
    with running(tmp_path, code, python=python) as (url, _, process):
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0


def test_handlers_in_a_module_of_the_script_start_the_server(tmp_path: Path, python: str) -> None:
    (tmp_path / "handlers.py").write_text(ASYNC_SCRIPT)
    with running(tmp_path, on_port("import handlers\n", free_port()), python=python) as (
        url,
        printed,
        _,
    ):
        assert f"  - POST {url}/webhooks/at_work" in printed


SLOW_SCRIPT = """
import sys, time
from receiver.server import webhook_endpoint, WebhookPayload

@webhook_endpoint
def slow(payload: WebhookPayload):
    print("at work", flush=True)
    time.sleep(1)
    return "done"
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 0)]
)
def test_a_signal_lets_a_handler_that_is_at_work_finish(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with (
        running(tmp_path, on_port(SLOW_SCRIPT, free_port())) as (url, _, process),
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(httpx.post, f"{url}/webhooks/slow", json=dataset_update(), timeout=30)
        assert process.stdout is not None
        assert "at work" in (line.strip() for line in process.stdout)
        process.send_signal(number)
        assert answer.result().json() == "done"
        assert process.wait(30) == code
        with pytest.raises(httpx.ConnectError):
            httpx.get(url)


def test_a_script_that_fails_starts_nothing(tmp_path: Path, python: str) -> None:
    script = tmp_path / "app.py"
    script.write_text(on_port(ASYNC_SCRIPT, free_port()) + "\nraise SystemError('no')\n")
    done = subprocess.run(
        [python, str(script)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "Webhooks are correctly setup" not in done.stdout


@pytest.mark.parametrize("ending", ["", "import sys\nsys.exit()\n"])
def test_a_busy_port_is_said_at_the_end_of_the_script(
    tmp_path: Path, python: str, ending: str
) -> None:
    from receiver.listen import bind

    script = tmp_path / "app.py"
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        script.write_text(ASYNC_SCRIPT + ending)
        done = subprocess.run(
            [python, str(script)],
            env=os.environ | {"PYTHONPATH": str(ROOT), "GRADIO_SERVER_PORT": str(port)},
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.stderr.startswith(f"Port {port} on 127.0.0.1 is in use"), done.stderr
    assert done.stderr.count("\n") == 1
    assert done.returncode == 1


def test_a_port_that_is_none_is_said_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADIO_SERVER_PORT", "many")
    with pytest.raises(AddressUnavailable, match="GRADIO_SERVER_PORT=many is not a port"):
        WebhooksServer()
