"""The torch engine keeps what every engine must."""

from pathlib import Path

import pytest
import torch

from serving.engines.torch_engine.engine import create_engine
from serving.weights.release import Probe, ProbeText, Release
from tests.contract.engine_bench import EngineBench
from tests.contract.engine_conformance import EngineConformance
from tests.serving_fixtures import CONTEXT, PROBE_TOKENS, byte_tokenizer
from tests.torch_engine_fixtures import build, expected, llama_config, publish

PROMPTS = ("Hello", "What is new?", "Grüße")
LONG_PROMPT = "Long enough that the engine keeps its keys and values."
"""The prefix cache shares no fewer than 16 tokens."""
MAX_TOKENS = 24


def torch_release(
    home: Path,
    seed: int,
    *,
    tied: bool,
    max_shard_bytes: int = 60_000,
    context: int = CONTEXT,
    prompts: tuple[str, ...] = PROMPTS,
    **shape: int,
) -> Release:
    config = llama_config(
        vocab_size=257,
        max_position_embeddings=context,
        tie_word_embeddings=tied,
        **shape,
    )
    network = build(config, seed)
    tokenizer = byte_tokenizer()
    for text in prompts:
        expected(network, tuple(tokenizer.encode(text).ids), MAX_TOKENS)
    files = home / "files"
    files.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(files / "tokenizer.json"))
    texts = []
    for token_ids in PROBE_TOKENS:
        with torch.inference_mode():
            found = network(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        logprobs = found[range(len(token_ids) - 1), token_ids[1:]].tolist()
        texts.append(ProbeText(token_ids=token_ids, logprobs=tuple(logprobs)))
    probe = Probe(dtype="float32", texts=tuple(texts), bounds={"float32": 1e-3})
    return publish(network, home, probe=probe, max_shard_bytes=max_shard_bytes).release


class TestTorchEngine(EngineConformance):
    has_prefix_cache = True

    @pytest.fixture
    def bench(self, tmp_path: Path) -> EngineBench:
        prompts = (*PROMPTS, LONG_PROMPT)
        first = torch_release(tmp_path, 1, tied=True, prompts=prompts)
        # The second is cut into other shards, and its head is its own.
        second = torch_release(tmp_path, 2, tied=False, max_shard_bytes=25_000, prompts=prompts)
        return EngineBench(
            make_engine=lambda: create_engine(num_threads=1, kv_cache_bytes=64 << 20),
            pipeline_dir=tmp_path / "releases",
            first=first,
            second=second,
            prompts=prompts,
        )
