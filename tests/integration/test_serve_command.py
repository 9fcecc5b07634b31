"""`pipeline serve`: what it takes, what it prints, and how it says that it cannot start."""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from typer.testing import CliRunner, Result

from pipeline.cli.main import app
from pipeline.cli.serve import _engine
from pipeline.settings import load_settings
from serving.engines.settings import TorchEngineSettings, VllmEngineSettings
from serving.settings import ServingSettings
from serving.weights.release_store import set_current
from tests.echo_engine import EchoEngine
from tests.serving_fixtures import echo_app, echo_release, running, server_process

ROOT = Path(__file__).parents[2]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "PIPELINE_HOME": str(tmp_path / "home"),
        "PIPELINE_SETTINGS": str(tmp_path / "pipeline.toml"),
        "PIPELINE_SERVING__PORT": "0",
    }


@pytest.fixture
def refused(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`pipeline serve` in this process, which does not start."""
    monkeypatch.setattr("pipeline.cli.serve.log_to_stderr", lambda *_: None)
    return lambda *arguments: CliRunner().invoke(app, ["serve", *arguments], env=environment)


def test_the_line_of_the_start_and_what_was_imported_is_not_looked_through_for_garbage(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    """Otherwise streams would wait meanwhile."""
    older, damaged = (echo_release(tmp_path, seed).id for seed in (1, 2))
    for release in (older, damaged):
        set_current(tmp_path, release)
    next((tmp_path / damaged).glob("*.safetensors")).unlink()
    code = """
import gc, sys
from pathlib import Path
from serving.app import serve
from serving.settings import ServingSettings
from tests.serving_fixtures import echo_app

app = echo_app(Path(sys.argv[1]))
app.get("/frozen")(lambda: [gc.get_freeze_count(), len(gc.get_objects())])
serve(app, ServingSettings(port=0))
"""
    with server_process("-c", code, str(tmp_path), env=environment) as (url, process):
        assert process.stdout is not None
        line = process.stdout.readline()
        num_frozen, num_looked_through = httpx.get(f"{url}/frozen").json()
    assert line.endswith(f"answers: {older} from {tmp_path / older} in place of {damaged}\n")
    assert num_frozen > 10 * num_looked_through


def test_a_folder_that_cannot_be_served_is_told(
    tmp_path: Path, refused: Callable[..., Result]
) -> None:
    assert "holds no weights" in str(refused(str(tmp_path), "--engine", "torch").exception)


def test_an_engine_that_is_not_installed_says_what_installs_it(
    tmp_path: Path, refused: Callable[..., Result]
) -> None:
    try:
        import vllm  # noqa: F401
    except ModuleNotFoundError:
        pass
    else:
        pytest.skip("it is installed here")
    said = str(refused(str(tmp_path), "--engine", "vllm").exception)
    assert "--engine vllm needs vllm" in said and "pip install -e '.[vllm]'" in said


@pytest.mark.parametrize(
    ("engine", "module", "kind", "table"),
    [
        (
            "vllm",
            "serving.engines.vllm_engine",
            VllmEngineSettings,
            {
                "way": "reload",
                "tensor_parallel_size": 2,
                "max_context": 512,
                "kv_cache_bytes": 1024,
                "start_seconds": 900,
            },
        ),
        (
            "torch",
            "serving.engines.torch_engine.engine",
            TorchEngineSettings,
            {
                "max_context": 512,
                "max_batch": 2,
                "kv_cache_bytes": 1024,
                "num_threads": 1,
            },
        ),
    ],
    ids=["vllm", "torch"],
)
def test_an_engine_is_told_what_its_table_says(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    engine: str,
    module: str,
    kind: type[BaseModel],
    table: dict[str, object],
) -> None:
    lines = [f"{key} = {json.dumps(value)}" for key, value in table.items()]
    (tmp_path / "pipeline.toml").write_text(
        f'[serving]\nengine = "{engine}"\ndtype = "bfloat16"\n[serving.{engine}]\n'
        + "\n".join(lines)
    )
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    told: dict[str, object] = {}
    # A made-up module, because without vLLM the engine's own cannot be imported.
    made_up = SimpleNamespace(create_engine=lambda **settings: told.update(settings))
    monkeypatch.setitem(sys.modules, module, made_up)
    monkeypatch.setattr(module, made_up, raising=False)
    _engine(load_settings().serving, busy_lock_file=tmp_path)
    if engine == "torch":
        assert told.pop("busy_lock_file") == tmp_path
    assert kind.model_validate(told) == kind.model_validate({"dtype": "bfloat16", **table})


@pytest.mark.parametrize("key", ["", " ", "secret\n", " secret", "se\tcret", "ключ"])
def test_a_key_that_no_client_can_send_opens_no_door(key: str) -> None:
    with pytest.raises(ValidationError, match="it is empty, begins or ends"):
        ServingSettings.model_validate({"api_key": key})


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_time(tmp_path: Path, stream: bool) -> None:
    set_current(tmp_path, echo_release(tmp_path, 1).id)
    engine = EchoEngine(step_seconds=0.05)
    with running(echo_app(tmp_path, engine, request_seconds=0.3)) as url:
        body = {"prompt": "Hi", "max_tokens": 100, "ignore_eos": True, "stream": stream}
        started = time.perf_counter()
        answer = httpx.post(f"{url}/v1/completions", json=body)
        assert time.perf_counter() - started < 3
        assert "deadline_exceeded" in answer.text
        assert answer.status_code == (200 if stream else 504)
        while engine.num_running.total():
            time.sleep(0.01)
        short = httpx.post(f"{url}/v1/completions", json={**body, "max_tokens": 2})
        assert "deadline_exceeded" not in short.text
