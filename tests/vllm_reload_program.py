"""Start vLLM on one release, let vLLM reload another; prints what it says and how far that is from
the release's probe, then both once the head is packed again. A program, since vLLM is not started
twice in one process."""

import sys
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams

from serving.tokenizer import load_tokenizer
from serving.weights.release_store import load_release
from tests.contract.engine_bench import MAX_TOKENS
from tests.contract.test_torch_engine_conformance import PROMPTS


def pack_heads(worker: Any) -> None:
    for module in worker.model_runner.get_model().modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            module.quant_method.process_weights_after_loading(module)


def main(first: str, second: str) -> None:
    llm = LLM(
        first,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=64 << 20,
    )
    tokenizer = load_tokenizer(Path(second))
    prompt = {"prompt_token_ids": list(tokenizer.encode(PROMPTS[0]))}
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)

    def say() -> None:
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        print(repr(tokenizer.decode(list(output.outputs[0].token_ids))))

    probe = load_release(Path(second)).probe
    assert probe is not None

    def measure() -> None:
        texts = [{"prompt_token_ids": list(text.token_ids)} for text in probe.texts]
        scoring = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        differences = [
            abs(found[token_id].logprob - expected)
            for text, output in zip(
                probe.texts, llm.generate(texts, scoring, use_tqdm=False), strict=True
            )
            for token_id, found, expected in zip(
                text.token_ids[1:], output.prompt_logprobs[1:], text.logprobs, strict=True
            )
        ]
        print(max(differences))

    llm.collective_rpc("reload_weights", kwargs={"weights_path": second})
    say()
    measure()
    worker = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker
    pack_heads(worker)
    say()
    measure()


if __name__ == "__main__":
    main(*sys.argv[1:])
