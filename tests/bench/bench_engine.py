"""Tokens per second of the torch engine, beside `transformers.generate` and the bare matmuls.

Run from the repository's root: `python -m tests.bench.bench_engine [--shape 7M] [--threads 2]`.
"""

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

SHAPES: dict[str, dict[str, int]] = {
    "7M": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "88M": {
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
    },
}
PROMPT_TOKENS = 16
NEW_TOKENS = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {options.threads} threads, {NEW_TOKENS} new tokens, best of")
    print(f"{options.repeats}; tokens/s")
    print(
        f"{'shape':>6} {'clients':>7} {'engine':>8} {'generate':>9} {'F.linear':>9} {'packed':>8}"
    )
    for shape in options.shape or SHAPES:
        measure(shape, options.threads, options.repeats)


def measure(shape: str, threads: int, repeats: int) -> None:
    from tests.torch_engine_fixtures import build, engine_with, llama_config, publish

    # The fixtures set it to one.
    torch.set_num_threads(threads)
    network: Any = build(
        llama_config(**SHAPES[shape], max_position_embeddings=1024, tie_word_embeddings=True)
    )

    async def of_engine(home: Path) -> dict[int, float]:
        published = publish(network, home)
        async with engine_with(published, num_threads=threads, kv_cache_bytes=2 << 30) as engine:
            found = {}
            for clients in (1, 4, 16):
                await generate_all(engine, published.id, clients)
                seconds = []
                for _ in range(repeats):
                    started = time.perf_counter()
                    await generate_all(engine, published.id, clients)
                    seconds.append(time.perf_counter() - started)
                found[clients] = clients * NEW_TOKENS / min(seconds)
            return found

    with tempfile.TemporaryDirectory() as home:
        engine_speed = asyncio.run(of_engine(Path(home)))
    for clients in (1, 4, 16):
        plain, packed = matmuls(network, clients, repeats)
        print(
            f"{shape:>6} {clients:>7} {engine_speed[clients]:>8.0f} "
            f"{of_generate(network, clients, repeats):>9.0f} {plain:>9.0f} {packed:>8.0f}"
        )


async def generate_all(engine: Any, release_id: str, clients: int) -> None:
    from tests.torch_engine_fixtures import ask_all, greedy, prompt

    asked = [greedy(prompt(PROMPT_TOKENS, seed), NEW_TOKENS) for seed in range(clients)]
    await ask_all(engine, release_id, asked)


@torch.inference_mode()
def of_generate(network: Any, clients: int, repeats: int) -> float:
    from tests.torch_engine_fixtures import prompt

    ids = torch.tensor([prompt(PROMPT_TOKENS, seed) for seed in range(clients)])

    def generate() -> None:
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )

    return clients * NEW_TOKENS / best(generate, repeats)


@torch.inference_mode()
def matmuls(network: Any, clients: int, repeats: int) -> tuple[float, float]:
    """Every weight matrix once per step and nothing else: plain, and packed as the engine does."""
    from serving.engines.torch_engine.linear import Linear

    weights = [m.weight for m in network.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {size: torch.randn(clients, size) for size in {w.shape[1] for w in weights}}
    packed = [Linear(weight, None) for weight in weights]

    def run_plain() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def run_packed() -> None:
        for weight, linear in zip(weights, packed, strict=True):
            linear(inputs[weight.shape[1]])

    return clients / best(run_plain, 10 * repeats), clients / best(run_packed, 10 * repeats)


def best(work: Callable[[], None], repeats: int) -> float:
    work()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


if __name__ == "__main__":
    main()
