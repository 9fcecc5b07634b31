"""vLLM behind the real server, started once for many tests: a start takes half a minute."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import torch

from serving.tokenizer import load_tokenizer
from serving.weights.release import Release
from serving.weights.release_store import set_current
from tests.contract.engine_bench import MAX_TOKENS, Cold, swap
from tests.contract.test_torch_engine_conformance import PROMPTS, torch_release
from tests.serving_fixtures import echo_app, running

if TYPE_CHECKING:
    from serving.engines.vllm_engine import VllmEngine

# vLLM's attention on a CPU computes heads of 32 and more.
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "context": 2048,
    "max_shard_bytes": 1_000_000,
}
BLOCK_TOKENS = 128
"""What vLLM caches at once on a CPU; prompts of fewer tokens are never found again."""
ENGINE = {"dtype": "float32", "kv_cache_bytes": 64 << 20}


@dataclass(frozen=True, kw_only=True)
class Served:
    """A running server over an engine, with two releases of one network."""

    url: str
    engine: "VllmEngine"
    pipeline_dir: Path
    first: Release
    second: Release

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=300)

    def swap(self, release_id: str) -> dict[str, Any]:
        with self.client() as http:
            result: dict[str, Any] = swap(http, release_id).json()
        return result

    def num_unfinished(self) -> int:
        """Sequences that vLLM was given and has not ended."""
        assert self.engine._llm is not None
        found: int = self.engine._llm.output_processor.get_num_unfinished_requests()
        return found

    def holds_no_blocks(self) -> bool:
        """vLLM resets its cache of prefixes only when no sequence has a part of it."""
        llm = self.engine._llm
        assert llm is not None and llm.output_handler is not None
        reset = asyncio.run_coroutine_threadsafe(
            llm.reset_prefix_cache(), llm.output_handler.get_loop()
        )
        return bool(reset.result(10))

    def completion(self, prompt: str = PROMPTS[0], **body: Any) -> httpx.Response:
        with self.client() as http:
            return http.post(
                "/v1/completions",
                json={
                    "prompt": prompt,
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                    "logprobs": 0,
                    "ignore_eos": True,
                    **body,
                },
            )


def vllm_release(home: Path, seed: int, *, tied: bool, **options: Any) -> Release:
    return torch_release(home, seed, tied=tied, **{**SHAPE, **options})


@contextlib.contextmanager
def served(home: Path, first: Release, second: Release, **engine: Any) -> Iterator[Served]:
    from serving.engines.vllm_engine import create_engine

    pipeline_dir = home / "releases"
    set_current(pipeline_dir, first.id)
    created = create_engine(**{**ENGINE, **engine})
    with running(echo_app(pipeline_dir, created)) as url:
        # The port listens at once; an answer comes when vLLM has started.
        httpx.get(f"{url}/health", timeout=300).raise_for_status()
        yield Served(url=url, engine=created, pipeline_dir=pipeline_dir, first=first, second=second)


@torch.inference_mode()
def cold_of(folder: Path, prompts: tuple[str, ...] = PROMPTS) -> Cold:
    """What `transformers` says on a release: an oracle that shares nothing with vLLM."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(folder)
    cold = Cold()
    for prompt in prompts:
        token_ids = list(tokenizer.encode(prompt))
        logprobs = []
        for _ in range(MAX_TOKENS):
            found = network(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
            logprobs.append(float(found.max()))
            token_ids.append(int(found.argmax()))
        cold.texts[prompt] = tokenizer.decode(token_ids[-MAX_TOKENS:])
        cold.tokens[prompt] = [tokenizer.token_text(each) for each in token_ids[-MAX_TOKENS:]]
        cold.logprobs[prompt] = logprobs
    return cold
