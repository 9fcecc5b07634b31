"""Checkpoints of many architectures, stored as the Hub stores them, answer as `transformers` does:
through HTTP, alone and eight at once, before and after swaps."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from serving.engines.torch_engine.engine import TorchEngine
from serving.engines.torch_engine.settings import TorchEngineSettings
from serving.weights.publish import publish_folder
from serving.weights.release_store import set_current
from tests.hub_checkpoints import CONFIGS, store
from tests.serving_fixtures import ADMIN_TOKEN, echo_app, running
from tests.torch_engine_fixtures import prompt, recorded_batches

NEW_TOKENS = 64
LENGTHS = (1, 17, 30, 60)
"""Of prompts, each of which is asked twice at once; some are longer than the window of networks
that have one."""


OF_THE_ENGINE = {"llama", "qwen2", "qwen3"}
"""Those whose forward pass is the engine's own."""


def test_every_architecture_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    releases = tmp_path / "answers"
    networks, names = {}, {}
    for name in CONFIGS:
        network = store(name, tmp_path / name)
        release_id = publish_folder(releases, tmp_path / name).id
        networks[release_id], names[release_id] = network, name
    batches = recorded_batches(monkeypatch)
    ids = list(networks)
    set_current(releases, ids[0])
    engine = TorchEngine(TorchEngineSettings(num_threads=1, kv_cache_bytes=64 << 20))
    app = echo_app(releases, engine, dtype="float32")
    with running(app) as url, httpx.Client(base_url=url, timeout=60) as client:
        # The first one again after the last: what was served before is served as before.
        for release_id in [*ids, ids[0]]:
            swap(client, release_id)
            batches.clear()
            check(client, networks[release_id], release_id)
            # How many of the eight meet depends on when they arrive.
            assert names[release_id] in OF_THE_ENGINE or max(batches) > 1, names[release_id]


def swap(client: httpx.Client, release_id: str) -> None:
    answer = client.post(
        "/admin/swap",
        json={"release": release_id},
        headers={"Authorization": f"Bearer {ADMIN_TOKEN}"},
    )
    assert answer.json()["result"] == "live", answer.text


def check(client: httpx.Client, network: Any, release_id: str) -> None:
    prompts = [prompt(length, seed=length) for length in LENGTHS]
    wanted = [generated(network, each) for each in prompts]
    alone = complete(client, prompts[2])
    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        together = list(threads.map(lambda each: complete(client, each), prompts * 2))
    answers = [alone, *together]
    for found, (token_ids, logprobs) in zip(answers, [wanted[2], *wanted * 2], strict=True):
        assert found["system_fingerprint"] == release_id
        choice = found["choices"][0]["logprobs"]
        assert [int(text.strip()[1:]) for text in choice["tokens"]] == token_ids, release_id
        assert choice["token_logprobs"] == pytest.approx(logprobs, abs=1e-3), release_id


def complete(client: httpx.Client, token_ids: tuple[int, ...], **changes: Any) -> Any:
    body = {"prompt": list(token_ids), "max_tokens": NEW_TOKENS, "temperature": 0, "logprobs": 0}
    answer = client.post("/v1/completions", json=body | changes)
    assert answer.status_code == 200, answer.text
    return answer.json()


@torch.inference_mode()
def generated(network: Any, token_ids: tuple[int, ...]) -> tuple[list[int], list[float]]:
    answer = network.generate(
        torch.tensor([token_ids]),
        attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        pad_token_id=0,
    )
    new: list[int] = answer.sequences[0, len(token_ids) :].tolist()
    rows = [logits[0].float().log_softmax(-1) for logits in answer.logits]
    return new, [row[token_id].item() for row, token_id in zip(rows, new, strict=True)]
