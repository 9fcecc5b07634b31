"""Tokens per second over HTTP: the embedded engine beside vLLM's own server.

Both answer the same prompts (token ids) from the same weights in float32, and both detokenize. They
are up at once and take turns, cell by cell; beside them, in the same turns, `transformers.generate`
on a static batch and the weight matrices alone, multiplied once per token and sequence: as
`F.linear` does it, and packed as the engine does.
"""

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.networks import PROMPT_TOKENS, build, prompt_of, publish
from tests.bench.result import Figure, Result, at_least, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving, wait_until_idle
from tests.bench.timing import in_turns


@dataclass(frozen=True, kw_only=True)
class Size:
    shapes: tuple[str, ...]
    clients: tuple[int, ...]
    tokens: tuple[int, ...]
    rounds: int
    turn_seconds: float
    """At least: what is over in a fraction of a second is done again until then, or whatever else
    the machine does in that moment decides a round."""


FULL = Size(shapes=("7M", "88M"), clients=(1, 4, 16), tokens=(64, 256), rounds=3, turn_seconds=1.5)
SMALL = Size(shapes=("tiny",), clients=(1, 2), tokens=(8,), rounds=1, turn_seconds=0.0)
RATIOS = {("tiny", 1): 1.0, ("7M", 1): 1.5, ("7M", 16): 1.3, ("88M", 1): 1.2, ("88M", 16): 1.05}
MATMUL_STEPS = 20
Rates = dict[str, list[float]]


def measure(size: Size) -> Result:
    """Tokens per second over HTTP, ours against vLLM's own server."""
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    shares = []
    for shape in size.shapes:
        rates = _rates(shape, size)
        detail[shape] = rates
        for (clients, tokens), cell in _cells(size, rates):
            median = {name: statistics.median(values) for name, values in cell.items()}
            what = f"{shape}, {clients} client{'s' * (clients > 1)}, {tokens} tokens"
            # Round by round: the machine's speed changes between them.
            rounds = zip(cell["torch"], cell["vllm"], strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in rounds)
            target = RATIOS.get((shape, clients))
            label = f"{what}: ours / vLLM"
            beside = ", ".join(
                f"{name} {median[key]:,.0f}"
                for key, name in (
                    ("torch", "ours"),
                    ("vllm", "vLLM"),
                    ("generate", "generate"),
                    ("linear", "F.linear only"),
                    ("packed", "packed only"),
                )
            )
            beside += " tokens/s"
            figures.append(
                reported(label, ratio, "x", beside=beside)
                if target is None
                else at_least(label, ratio, target, "x", beside=beside)
            )
            shares.append(median["torch"] / median["packed"])
    return Result(
        figures=tuple(figures),
        bounded_by=f"the weight matrices: ours reaches {min(shares):.0%} to {max(shares):.0%} of "
        "what they alone would, packed; the rest is attention over the keys and values so far, "
        "sampling, and HTTP",
        detail=detail,
    )


def _cells(size: Size, rates: dict[str, Rates]) -> list[tuple[tuple[int, int], Rates]]:
    return [
        ((clients, tokens), rates[f"{clients}x{tokens}"])
        for clients, tokens in itertools.product(size.clients, size.tokens)
    ]


def _rates(shape: str, size: Size) -> dict[str, Rates]:
    import torch

    network = build(shape, 1)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        release = publish(network, pipeline_dir(home))
        with serving("torch", release, home) as ours, serving("vllm-own", release, home) as theirs:
            return {
                f"{clients}x{tokens}": _cell(ours, theirs, network, clients, tokens, size)
                for clients, tokens in itertools.product(size.clients, size.tokens)
            }


def _cell(
    ours: Server, theirs: Server, network: Any, clients: int, tokens: int, size: Size
) -> Rates:
    # Nobody answers from a prefix cache: vLLM's holds blocks of 128 tokens, and a prompt has 16.
    seeds = itertools.count(1)
    per_second = partial(_per_second, seconds=size.turn_seconds)

    def over_http(server: Server) -> float:
        with ThreadPoolExecutor(clients) as pool:

            def burst() -> None:
                for _ in pool.map(
                    lambda seed: server.ask(prompt_of(seed), tokens), _take(seeds, clients)
                ):
                    pass

            return clients * tokens * per_second(burst)

    plain, packed = _matmuls(network, clients)
    found = in_turns(
        size.rounds + 1,
        {
            "torch": lambda: over_http(ours),
            "vllm": lambda: over_http(theirs),
            "generate": lambda: (
                clients * tokens * per_second(lambda: _generate(network, clients, tokens))
            ),
            "linear": lambda: MATMUL_STEPS * clients * per_second(plain),
            "packed": lambda: MATMUL_STEPS * clients * per_second(packed),
        },
        before=partial(wait_until_idle, ours, theirs),
    )
    # The first round warms up.
    return {name: values[1:] for name, values in found.items()}


def _per_second(work: Callable[[], None], seconds: float) -> float:
    started, count = time.perf_counter(), 0
    while True:
        work()
        count += 1
        if (taken := time.perf_counter() - started) >= seconds:
            return count / taken


def _take(seeds: "itertools.count[int]", count: int) -> list[int]:
    return list(itertools.islice(seeds, count))


def _generate(network: Any, clients: int, tokens: int) -> None:
    import torch

    ids = torch.tensor([prompt_of(seed, PROMPT_TOKENS) for seed in range(clients)])
    with torch.inference_mode():
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )


def _matmuls(network: Any, clients: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Some steps in which every weight matrix is multiplied once and nothing else."""
    import torch
    from torch.nn import functional as F

    from serving.engines.torch_engine.linear import Linear

    weights = [m.weight for m in network.modules() if isinstance(m, torch.nn.Linear)]
    inputs = {size: torch.randn(clients, size) for size in {w.shape[1] for w in weights}}
    with torch.inference_mode():
        packed = [Linear(weight, None) for weight in weights]

    @torch.inference_mode()
    def plain_steps() -> None:
        for _ in range(MATMUL_STEPS):
            for weight in weights:
                F.linear(inputs[weight.shape[1]], weight)

    @torch.inference_mode()
    def packed_steps() -> None:
        for _ in range(MATMUL_STEPS):
            for weight, linear in zip(weights, packed, strict=True):
                linear(inputs[weight.shape[1]])

    return plain_steps, packed_steps


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
