"""A model that was really trained answers as `transformers` does: through HTTP, alone and eight at
once, before and after swaps."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from serving.engines.settings import TorchEngineSettings
from serving.engines.torch_engine.engine import TorchEngine
from serving.tokenizer import ReleaseTokenizer, load_tokenizer
from serving.weights.release_store import set_current
from tests.bench.bench_swaps import pretrained
from tests.bench.server import pipeline_dir
from tests.contract.engine_bench import swap
from tests.serving_fixtures import echo_app, running

# The first run of a machine downloads the model.
pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

TEXT = (
    "A lighthouse stands on a small island in the north. Every evening its keeper climbs the "
    "stairs, cleans the lamp and writes down the weather. In winter the storms are strong, and no "
    "boat can land for weeks. Then the keeper reads old letters, repairs the radio, and counts the "
    "birds that rest on the rocks. One night in December the lamp went out, and"
)
LENGTHS = (1, 17, 30, 60)
"""Of prompts, each of which is asked twice at once."""
NEW_TOKENS = 24
"""Enough for each answer to grow into another block of the KV cache, which has 16 tokens."""

Answer = tuple[list[int], list[float]]


def test_a_trained_model_answers_as_transformers_does(tmp_path: Path) -> None:
    published = pretrained(tmp_path)
    releases = pipeline_dir(tmp_path)
    tokenizer = load_tokenizer(published[0].folder)
    token_ids = tokenizer.encode(TEXT)
    prompts = [token_ids[-length:] for length in LENGTHS]
    wanted: dict[str, list[Answer]] = {}
    for each in published:
        each.network.generation_config.eos_token_id = None
        wanted[each.release_id] = [generated(each.network, prompt) for prompt in prompts]
    first, second = wanted
    assert wanted[first] != wanted[second]
    set_current(releases, first)
    app = echo_app(releases, TorchEngine(TorchEngineSettings()), dtype="float32")
    with running(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        client.get("/health").raise_for_status()
        check(client, tokenizer, prompts, first, wanted[first])
        for release_id in (second, first):
            assert swap(client, release_id).json()["result"] == "live"
            check(client, tokenizer, prompts, release_id, wanted[release_id])


def check(
    client: httpx.Client,
    tokenizer: ReleaseTokenizer,
    prompts: list[tuple[int, ...]],
    release_id: str,
    wanted: list[Answer],
) -> None:
    def ask(prompt: tuple[int, ...]) -> Any:
        return complete(client, prompt, ignore_eos=True)

    alone = ask(prompts[2])
    with ThreadPoolExecutor(2 * len(prompts)) as threads:
        together = list(threads.map(ask, prompts * 2))
    for found, (token_ids, logprobs) in zip(
        [alone, *together], [wanted[2], *wanted * 2], strict=True
    ):
        assert found["system_fingerprint"] == release_id
        assert len(token_ids) == NEW_TOKENS
        choice = found["choices"][0]["logprobs"]
        assert choice["tokens"] == [tokenizer.token_text(each) for each in token_ids]
        assert choice["token_logprobs"] == pytest.approx(logprobs, abs=1e-3)


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
