"""A model that people serve, SmolLM2-135M-Instruct, on prompts that are real text.

The embedded engine and vLLM's own server have the same weights. Both are up, and they take turns.
A turn begins when both are idle.
The prompts are docstrings of the standard library, and no two requests have the same beginning, so
that no prefix cache answers. Beside these: what sampling costs on a large vocabulary, and how soon
a second turn answers, whose beginning is the first turn.
"""

import itertools
import os
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.bench.networks import build, publish
from tests.bench.prompts import Prompts
from tests.bench.result import Figure, Result, at_least, at_most, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving, wait_until_idle
from tests.bench.timing import in_turns
from tests.smollm2 import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class Size:
    dtypes: tuple[str, ...]
    clients: tuple[int, ...]
    long_clients: tuple[int, ...]
    """With long prompts."""
    prompt_tokens: int
    long_prompt_tokens: int
    tokens: int
    """Of each answer."""
    rounds: int
    turn_seconds: float
    """At least."""
    context: int
    compiles: bool = True
    """Whether vLLM's own server compiles the model, as a user's does. It takes minutes."""


FULL = Size(
    dtypes=("float32", "bfloat16"),
    clients=(1, 4, 16),
    long_clients=(1, 4),
    prompt_tokens=32,
    long_prompt_tokens=2_000,
    tokens=48,
    rounds=5,
    turn_seconds=2.0,
    context=8192,
)
SMALL = Size(
    dtypes=("float32",),
    clients=(2,),
    long_clients=(1,),
    prompt_tokens=32,
    long_prompt_tokens=200,
    tokens=4,
    rounds=1,
    turn_seconds=0.0,
    context=8192,
    compiles=False,
)
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
TEMPERATURE = {"temperature": 1.0}
SAMPLED_STREAMS = 16
MIN_RATIOS = {1: 1.2, 4: 1.1, 16: 1.1}
"""Clients → ours / vLLM."""
MIN_SAMPLED_SHARE = 0.85
"""Of greedy tokens per second."""
MAX_SECOND_TURN = 0.15
"""Seconds until the first token, as a share of the first turn's."""
PROBE_TOKENS = 64


def measure(size: Size) -> Result:
    """A pretrained model over HTTP, against vLLM's own server."""
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    for dtype in size.dtypes:
        if dtype == "bfloat16" and not _computes_bfloat16():
            figures.append(
                reported("bfloat16: this processor does not compute it", float("nan"), "")
            )
            continue
        with tempfile.TemporaryDirectory() as name:
            found, rounds = _pretrained(Path(name), dtype, size)
        figures += found
        detail[dtype] = rounds
    with tempfile.TemporaryDirectory() as name:
        found, rounds = _large_vocabulary(Path(name), size)
    detail["50k"] = rounds
    return Result(
        figures=(*figures, *found),
        bounded_by="the weight matrices, which each step reads once for all sequences; for long "
        "prompts the multiplications of the prompt's tokens",
        detail=detail,
    )


def _pretrained(home: Path, dtype: str, size: Size) -> tuple[list[Figure], dict[str, Any]]:
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.retrain.export import make_probe

    checkpoint = checkpoint_folder()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    prompts = Prompts(checkpoint)
    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    probe = make_probe(network.float(), [tuple(text) for text in prompts.take(4, PROBE_TOKENS)])
    network = network.to(getattr(torch, dtype))
    release = publish(network, pipeline_dir(home), tokenizer_of=checkpoint, probe=probe)
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    with (
        serving("torch", release, home) as ours,
        serving(
            "vllm-own",
            release,
            home,
            dtype=dtype,
            context=size.context,
            compiles=size.compiles,
        ) as theirs,
    ):
        settle = partial(wait_until_idle, ours, theirs)
        lengths = [(size.prompt_tokens, size.clients), (size.long_prompt_tokens, size.long_clients)]
        for length, all_clients in lengths:
            for clients, sampling in itertools.product(all_clients, ({}, SAMPLED)):
                rates = in_turns(
                    size.rounds + 1,
                    {
                        "torch": partial(_rate, ours, prompts, length, clients, sampling, size),
                        "vllm": partial(_rate, theirs, prompts, length, clients, sampling, size),
                    }
                    | (
                        {"generate": partial(_generate, network, prompts, length, size)}
                        if clients == 1 and not sampling
                        else {}
                    ),
                    before=settle,
                )
                rates = {name: values[1:] for name, values in rates.items()}  # warmed up
                how = "temperature 0.7, top-p 0.9" if sampling else "greedy"
                what = f"{dtype}, prompts of {length}, {clients} client{'s' * (clients > 1)}, {how}"
                detail[what] = rates
                figures.append(_compared(what, rates, clients))
        turns = in_turns(
            size.rounds + 1,
            {
                "torch": partial(_second_turn, ours, prompts, size),
                "vllm": partial(_second_turn, theirs, prompts, size),
            },
            before=settle,
        )
    detail["second turn"] = turns
    shares = {name: statistics.median(values[1:]) for name, values in turns.items()}
    second = f"{dtype}, second turn over {size.long_prompt_tokens} shared tokens"
    figures += [
        at_most(f"{second}: first token / the first turn's", shares["torch"], MAX_SECOND_TURN, "x"),
        reported(f"{second}: the same of vLLM", shares["vllm"], "x"),
    ]
    return figures, detail


def _compared(what: str, rates: dict[str, list[float]], clients: int) -> Figure:
    # Round by round: the machine's speed changes between them.
    rounds = zip(rates["torch"], rates["vllm"], strict=True)
    ratio = statistics.median(ours / theirs for ours, theirs in rounds)
    names = {"torch": "ours", "vllm": "vLLM", "generate": "generate"}
    medians = ", ".join(
        f"{names[name]} {statistics.median(values):,.0f}" for name, values in rates.items()
    )
    label = f"{what}: ours / vLLM"
    if (target := MIN_RATIOS.get(clients)) is None:
        return reported(label, ratio, "x", beside=f"{medians} tokens/s")
    return at_least(label, ratio, target, "x", beside=f"{medians} tokens/s")


def _large_vocabulary(home: Path, size: Size) -> tuple[list[Figure], dict[str, Any]]:
    release = publish(build("50k", 1), pipeline_dir(home))
    prompts = Prompts(release.folder)
    kinds = {"greedy": {}, "sampled": SAMPLED, "temperature 1": TEMPERATURE}
    with serving("torch", release, home) as server:
        rates = in_turns(
            size.rounds + 1,
            {
                name: partial(
                    _rate, server, prompts, size.prompt_tokens, SAMPLED_STREAMS, sampling, size
                )
                for name, sampling in kinds.items()
            },
        )
    rates = {name: values[1:] for name, values in rates.items()}
    what = f"a vocabulary of 50,000, {SAMPLED_STREAMS} streams"
    medians = ", ".join(f"{name} {statistics.median(rates[name]):,.0f}" for name in kinds)

    def share(name: str) -> float:
        rounds = zip(rates[name], rates["greedy"], strict=True)
        return statistics.median(sampled / greedy for sampled, greedy in rounds)

    return [
        at_least(
            f"{what}: temperature 0.7, top-p 0.9 / greedy",
            share("sampled"),
            MIN_SAMPLED_SHARE,
            "x",
            beside=f"{medians} tokens/s",
        ),
        at_least(f"{what}: temperature 1 / greedy", share("temperature 1"), MIN_SAMPLED_SHARE, "x"),
    ], rates


def _rate(
    server: Server,
    prompts: Prompts,
    length: int,
    clients: int,
    sampling: dict[str, float],
    size: Size,
) -> float:
    """New tokens per second, of all clients together."""
    started, count = time.perf_counter(), 0
    with ThreadPoolExecutor(clients) as pool:
        while True:
            answers = pool.map(
                lambda prompt: server.ask(prompt, size.tokens, **sampling),
                prompts.take(clients, length),
            )
            count += len(list(answers))
            if (taken := time.perf_counter() - started) >= size.turn_seconds:
                return count * size.tokens / taken


def _second_turn(server: Server, prompts: Prompts, size: Size) -> float:
    """Seconds until the first token of a prompt that goes on with the one before it, as a share of
    the seconds of the one before it."""
    [whole] = prompts.take(1, size.long_prompt_tokens + size.prompt_tokens)
    first = _first_token(server, whole[: size.long_prompt_tokens], size.tokens)
    return _first_token(server, whole, size.tokens) / first


def _first_token(server: Server, prompt: list[int], tokens: int) -> float:
    moments: list[float] = []
    started = time.perf_counter()
    server.stream(prompt, tokens, lambda: moments.append(time.perf_counter()))
    return moments[0] - started


def _generate(network: Any, prompts: Prompts, length: int, size: Size) -> float:
    import torch

    [prompt] = prompts.take(1, length)
    ids = torch.tensor([prompt])
    started = time.perf_counter()
    with torch.inference_mode():
        network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=size.tokens,
            max_new_tokens=size.tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return size.tokens / (time.perf_counter() - started)


def _computes_bfloat16() -> bool:
    import torch

    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
