"""Which answers an engine may gather tokens for, and what is measured of them then."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from serving.engine import Generation
from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.settings import TorchEngineSettings
from tests.bench.networks import build, publish
from tests.serving_fixtures import echo_app, running


@pytest.mark.parametrize(
    ("changes", "is_gathered"),
    [({}, True), ({"stream": True}, False), ({"stop": ["nowhere"]}, False)],
    ids=["whole", "stream", "stop"],
)
def test_whole_answers_are_gathered_and_each_token_is_measured(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    is_gathered: bool,
) -> None:
    release = publish(build("tiny", 1), tmp_path)
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=1 << 24))
    asked: list[Generation] = []
    generate = engine.generate

    def remember(release_id: str, generation: Generation) -> Any:
        asked.append(generation)
        return generate(release_id, generation)

    monkeypatch.setattr(engine, "generate", remember)
    body = {"prompt": [1, 2, 3], "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    with (
        running(echo_app(tmp_path, engine, folder=release.folder)) as url,
        httpx.Client(base_url=url) as http,
    ):
        answer = http.post("/v1/completions", json=body | changes)
        lines = http.get("/metrics").text.splitlines()
    assert answer.status_code == 200, answer.text
    (generation,) = [each for each in asked if each.max_tokens == 30]
    assert (generation.max_step_tokens > 1) == is_gathered
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    label = '{engine="0",model_name="answers"}'
    assert values[f"vllm:time_to_first_token_seconds_count{label}"] == "1.0"
    assert values[f"vllm:inter_token_latency_seconds_count{label}"] == "29.0"
