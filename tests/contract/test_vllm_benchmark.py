"""vLLM's serving benchmark runs against this server, and counts what it was told to ask for."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="make test-vllm has it", exc_type=ModuleNotFoundError)

from transformers import PreTrainedTokenizerFast

from serving.engines.torch_engine.engine import create_engine
from serving.weights.release_store import set_current
from tests.contract.test_torch_engine_conformance import torch_release
from tests.serving_fixtures import byte_tokenizer, echo_app, running

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 8, 20, 16


def test_the_benchmark_of_vllm_is_answered(tmp_path: Path) -> None:
    release = torch_release(tmp_path, 1, tied=True)
    set_current(tmp_path / "releases", release.id)
    PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(), eos_token="<eos>", clean_up_tokenization_spaces=False
    ).save_pretrained(tmp_path / "tokenizer")
    engine = create_engine(num_threads=1, kv_cache_bytes=64 << 20)
    with running(echo_app(tmp_path / "releases", engine)) as url:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.vllm_benchmark_program"),
                *("--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions"),
                *("--model", "answers", "--tokenizer", str(tmp_path / "tokenizer")),
                *("--dataset-name", "random", "--num-prompts", str(NUM_PROMPTS)),
                *("--random-input-len", str(INPUT_TOKENS)),
                *("--random-output-len", str(OUTPUT_TOKENS)),
                *("--max-concurrency", "4", "--ignore-eos", "--disable-tqdm"),
                *("--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json"),
            ],
            cwd=Path(__file__).parents[2],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=280,
        )
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == NUM_PROMPTS
    assert result["total_output_tokens"] == NUM_PROMPTS * OUTPUT_TOKENS
    assert result["mean_ttft_ms"] > 0 and result["mean_itl_ms"] > 0
