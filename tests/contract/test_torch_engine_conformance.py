"""The embedded torch engine keeps what every engine must: tied and untied, safetensors and bin."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.retrain.probe import make_probe
from serving.engines.torch_engine.engine import create_engine
from serving.weights.publish import publish_state_dict
from serving.weights.release import Lineage, Release
from tests.contract.engine_conformance import EngineBench, EngineConformance
from tests.serving_fixtures import CONTEXT, EOS, PROBE_TOKENS, byte_tokenizer
from tests.torch_engine_fixtures import build, llama_config

FIRST_SEED, SECOND_SEED = 1, 2


def llama_release(pipeline_dir: Path, seed: int, *, tied: bool, **options: Any) -> Release:
    """Random weights with clear choices: the wide initialisation keeps top tokens far apart."""
    config = llama_config(
        vocab_size=EOS + 1, max_position_embeddings=CONTEXT, tie_word_embeddings=tied
    )
    network: Any = build(config, seed)
    files = pipeline_dir.parent / f"files-{seed}"
    files.mkdir(parents=True)
    network.config.architectures = [type(network).__name__]
    network.config.save_pretrained(files)
    byte_tokenizer().save(str(files / "tokenizer.json"))
    return publish_state_dict(
        pipeline_dir,
        network.state_dict(keep_vars=True),
        files_dir=files,
        lineage=Lineage(dataset_revision=f"{seed:040x}"),
        probe=make_probe(network, PROBE_TOKENS),
        **options,
    )


class TestTorchEngine(EngineConformance):
    num_swaps = 6

    @pytest.fixture(params=["tied", "untied", "bin"])
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> EngineBench:
        torch.set_num_threads(1)
        pipeline_dir = tmp_path / "answers"
        tied = request.param != "untied"
        form: Any = {"format": "bin"} if request.param == "bin" else {}
        return EngineBench(
            make_engine=lambda: create_engine(num_threads=1, kv_cache_bytes=64 << 20),
            pipeline_dir=pipeline_dir,
            first=llama_release(pipeline_dir, FIRST_SEED, tied=tied),
            # Other shard boundaries, and in one case another file format.
            second=llama_release(
                pipeline_dir, SECOND_SEED, tied=tied, max_shard_bytes=40_000, **form
            ),
            prompts=("Hello", "What is new?", "Grüße"),
        )
