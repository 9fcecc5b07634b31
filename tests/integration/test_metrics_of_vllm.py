"""Metrics with vLLM's names mean what they mean in vLLM, where a request is one sequence."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.scheduler import Scheduler
from serving.weights.release_store import set_current
from tests.bench.networks import build, publish
from tests.serving_fixtures import echo_app, echo_release, running

USAGE = "vllm:kv_cache_usage_perc"


def vllm_metrics(http: httpx.Client) -> dict[str, float]:
    """Of each name the sum."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(http.get("/metrics").text):
        for sample in family.samples:
            if sample.name.startswith("vllm:"):
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("answers", "0")
                found[sample.name] = found.get(sample.name, 0) + sample.value
    return found


def grown_by(pipeline_dir: Path, body: dict[str, Any], status: int = 200) -> dict[str, float]:
    """What a request adds to each."""
    set_current(pipeline_dir, echo_release(pipeline_dir, 1).id)
    with running(echo_app(pipeline_dir)) as url, httpx.Client(base_url=url) as http:
        assert http.get("/health").is_success
        before = vllm_metrics(http)
        assert http.post("/v1/completions", json=body).status_code == status
        after = vllm_metrics(http)
    return {name: value - before.get(name, 0) for name, value in after.items()}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("n", [1, 2])
def test_dashboards_and_autoscalers_of_vllm_find_their_metrics(
    tmp_path: Path, stream: bool, n: int
) -> None:
    body = {"prompt": ["Hello", "You"], "n": n, "max_tokens": 6, "ignore_eos": True}
    grown = grown_by(tmp_path, {**body, "stream": stream})
    assert grown["vllm:prompt_tokens_total"] == n * 8
    assert grown["vllm:generation_tokens_total"] == n * 12
    assert grown["vllm:time_to_first_token_seconds_count"] == n * 2
    assert grown["vllm:inter_token_latency_seconds_count"] == n * 10
    assert grown["vllm:e2e_request_latency_seconds_count"] == n * 2
    assert grown["vllm:request_prompt_tokens_count"] == n * 2
    assert grown["vllm:request_prompt_tokens_sum"] == n * 8
    assert grown["vllm:request_generation_tokens_sum"] == n * 12
    assert grown["vllm:prefix_cache_queries_total"] == n * 8
    assert grown["vllm:request_success_total"] == n * 2
    assert grown["vllm:request_decode_time_seconds_count"] == n * 2
    assert grown["vllm:num_requests_running"] == grown["vllm:num_requests_waiting"] == 0


def test_a_request_that_is_refused_adds_nothing(tmp_path: Path) -> None:
    # The engine refuses it, after its prompt was tokenised.
    grown = grown_by(
        tmp_path, {"prompt": "Hello", "structured_outputs": {"choice": ["yes"]}}, status=400
    )
    assert grown and not any(grown.values()), grown


def test_the_use_of_the_kv_cache_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    release = publish(build("tiny", 1), tmp_path / "torch")
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=1 << 24))
    step = Scheduler.step
    usages: list[float] = []

    def step_and_look(self: Scheduler, **options: Any) -> Any:
        events = step(self, **options)
        usages.append(engine.kv_cache_usage)
        return events

    monkeypatch.setattr(Scheduler, "step", step_and_look)
    with running(echo_app(tmp_path / "torch", engine, folder=release.folder)) as url:
        body = {"prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/completions", json=body).is_success
        labels = '{engine="0",model_name="answers"}'
        assert f"{USAGE}{labels} 0.0" in httpx.get(f"{url}/metrics").text
    assert all(0 < usage < 1 for usage in usages[-5:-1]) and usages[-1] == 0


def test_prompt_tokens_from_the_cache_are_counted(tmp_path: Path) -> None:
    release = publish(build("tiny", 1), tmp_path)
    settings = TorchEngineSettings(num_threads=1, kv_cache_bytes=1 << 24)
    app = echo_app(tmp_path, TorchEngine(settings), folder=release.folder)
    body = {"prompt": [3] * 40, "max_tokens": 1, "stream_options": {"include_usage": True}}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        first = http.post("/v1/completions", json={**body, "stream": True}).text
        again = http.post("/v1/completions", json={**body, "stream": True}).text
        assert vllm_metrics(http)["vllm:prefix_cache_hits_total"] == 39
    # At least the last token is computed, since its logits choose the next one.
    assert '"cached_tokens": 0}' in first and '"cached_tokens": 39}' in again


def test_the_waits_of_sequences_are_measured_where_the_engine_computes(tmp_path: Path) -> None:
    release = publish(build("tiny", 1), tmp_path)
    # Four blocks of 32 tokens: they hold both prompts, but not both answers. One waits again.
    settings = TorchEngineSettings(num_threads=1, kv_cache_bytes=4 << 15)
    app = echo_app(tmp_path, TorchEngine(settings), folder=release.folder)
    body = {"prompt": [[1] * 20, [2] * 20], "max_tokens": 60, "ignore_eos": True}
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as http:
        assert http.post("/v1/completions", json=body).is_success
        found = vllm_metrics(http)
    assert found["vllm:num_preemptions_total"] >= 1
    parts = ("queue", "prefill", "decode")
    assert {found[f"vllm:request_{part}_time_seconds_count"] for part in parts} == {2}
    seconds = [found[f"vllm:request_{part}_time_seconds_sum"] for part in parts]
    assert all(seconds) and sum(seconds) <= found["vllm:e2e_request_latency_seconds_sum"]
