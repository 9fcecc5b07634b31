"""`generation_config.json` says what a request that leaves a field out, or sends null, gets."""

import json
from pathlib import Path
from typing import Any

import httpx

from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.weights.publish import publish_folder
from serving.weights.release_store import set_current
from tests.hub_checkpoints import store
from tests.serving_fixtures import echo_app, running
from tests.torch_engine_fixtures import expected, prompt


def test_a_request_gets_the_releases_defaults_and_its_own_fields_win(tmp_path: Path) -> None:
    network = store("qwen2", tmp_path / "checkpoint")
    written = {"temperature": 0.0, "repetition_penalty": 5.0, "max_new_tokens": 7}
    (tmp_path / "checkpoint" / "generation_config.json").write_text(json.dumps(written))
    releases = tmp_path / "answers"
    set_current(releases, publish_folder(releases, tmp_path / "checkpoint").id)
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=1 << 24))
    asked = prompt(9, seed=2)
    greedy = expected(network, asked, 20)
    assert len(set(greedy)) < 20, "a penalty would change nothing"
    with running(echo_app(releases, engine, dtype="float32")) as url:

        def complete(**fields: Any) -> list[int]:
            body = {"prompt": list(asked), "logprobs": 0, **fields}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
            tokens = answer["choices"][0]["logprobs"]["tokens"]
            return [int(text.strip()[1:]) for text in tokens]

        # As OpenAI and vLLM: a completion without `max_tokens` has 16 tokens, whatever the release.
        assert len(complete()) == len(complete(max_tokens=None)) == 16
        penalised = complete(max_tokens=20)
        assert penalised == complete(max_tokens=20, temperature=None, repetition_penalty=None)
        assert len(set(penalised)) > len(set(greedy))
        assert complete(max_tokens=20, repetition_penalty=1) == greedy
        sampled = [complete(max_tokens=20, temperature=2, seed=seed) for seed in (1, 2)]
        assert sampled[0] != sampled[1]
