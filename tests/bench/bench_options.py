"""What other ways to compute could win, before one of them is built.

Prompt lookup: `generate` of `transformers` with and without it, which is exact under greedy
decoding. Weights in 8 bits: the products of all matrices of the network, in the packed layout of
the engine and by other means. An engine in a process of its own: the engine alone, against our
server over HTTP, since it can win no more than HTTP takes. One copy of a tied head: its product
with the embedding, which need not be packed a second time.

`torchao` is measured if it is installed; nothing else needs it.
"""

import asyncio
import itertools
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.bench.networks import Published, build, prompt_of, publish
from tests.bench.prompts import Prompts
from tests.bench.result import Figure, Result, at_least, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving
from tests.bench.timing import in_turns
from tests.smollm2 import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class Size:
    shape: str
    rows: tuple[int, ...]
    """Of the products: sequences that decode together."""
    clients: int
    prompt_tokens: int
    tokens: int
    """Of each answer."""
    lookup_tokens: int
    """How many tokens prompt lookup takes from the prompt at once."""
    rounds: int
    turn_seconds: float
    """At least."""


FULL = Size(
    shape="SmolLM2",
    rows=(1, 4, 16),
    clients=16,
    prompt_tokens=32,
    tokens=48,
    lookup_tokens=8,
    rounds=5,
    turn_seconds=2.0,
)
SMALL = Size(
    shape="tiny",
    rows=(1, 2),
    clients=2,
    prompt_tokens=16,
    tokens=8,
    lookup_tokens=4,
    rounds=1,
    turn_seconds=0.0,
)
PRETRAINED = "SmolLM2"
MIN_GAIN = 1.2
"""What an option must win to be taken, where it is meant to win."""
MIN_ELSEWHERE = 0.95
"""And what it must keep elsewhere."""
QUOTED = (
    "Parcels up to two kilograms leave the store on the day of the order, if it comes before noon. "
    "Heavier parcels leave on the next working day. The customer gets a message with the number of "
    "the parcel, and a second one on the morning of the delivery."
)
ASKED = {
    "quoting": f"Repeat this text word for word, and write nothing else:\n\n{QUOTED}",
    "ordinary": "Write a short story about a lighthouse keeper and a storm.",
}

Products = Callable[[int], None]
"""Multiplies so many rows with every matrix."""


def measure(size: Size) -> Result:
    """Other ways to compute, against today's: what each could win."""
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    detail: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        network, release = _network(home, size)
        with torch.inference_mode():
            figures = [
                *_lookup(network, size, detail),
                *_matrices(network, size, detail),
                *_head(network, size, detail),
            ]
        figures += _without_http(home, release, size, detail)
    return Result(
        figures=tuple(figures),
        bounded_by="the bytes of the weights, which each step reads once; HTTP takes a part of one "
        "core from the thread that computes",
        detail=detail,
    )


def _network(home: Path, size: Size) -> tuple[Any, Published]:
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.retrain.probe import make_probe

    if size.shape != PRETRAINED:
        network = build(size.shape, 1)
        return network, publish(network, pipeline_dir(home))
    folder = checkpoint_folder()
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    probe = make_probe(network, [tuple(text) for text in Prompts(folder).take(4, 64)])
    return network, publish(network, pipeline_dir(home), tokenizer_of=folder, probe=probe)


def _lookup(network: Any, size: Size, detail: dict[str, Any]) -> Iterator[Figure]:
    for kind, prompt in _lookup_prompts(size).items():
        answers: dict[str, list[int]] = {}

        def generate(name: str, prompt: list[int], answers: dict[str, list[int]]) -> float:
            import torch

            ids = torch.tensor([prompt])
            options = {"prompt_lookup_num_tokens": size.lookup_tokens} if name == "lookup" else {}
            started = time.perf_counter()
            found = network.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=size.tokens,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
            taken = time.perf_counter() - started
            answers[name] = found[0, len(prompt) :].tolist()
            return len(answers[name]) / taken

        rates = _warm(
            size,
            {name: partial(generate, name, prompt, answers) for name in ("generate", "lookup")},
        )
        detail[f"lookup, {kind}"] = rates
        target = MIN_GAIN if kind == "quoting" else MIN_ELSEWHERE
        equal = "the same tokens" if answers["lookup"] == answers["generate"] else "OTHER TOKENS"
        yield at_least(
            f"prompt lookup / generate, 1 client, {kind} prompt",
            _ratio(rates, "lookup", "generate"),
            target,
            "x",
            beside=f"{_medians(rates, 'tokens/s')}; {equal}",
        )


def _lookup_prompts(size: Size) -> dict[str, list[int]]:
    if size.shape != PRETRAINED:
        return {kind: prompt_of(7, size.prompt_tokens) for kind in ASKED}
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint_folder())
    return {
        kind: tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        for kind, text in ASKED.items()
    }


def _matrices(network: Any, size: Size, detail: dict[str, Any]) -> Iterator[Figure]:
    import torch

    weights = [module.weight for module in network.modules() if isinstance(module, torch.nn.Linear)]
    kinds = {
        "float32": _packed(weights, torch.float32),
        "bfloat16": _packed(weights, torch.bfloat16),
        "dynamic int8 of torch": _dynamic(weights),
        **_torchao(weights),
    }
    for rows in size.rows:
        works = {
            kind: partial(_milliseconds, partial(products, rows), size)
            for kind, products in kinds.items()
        }
        taken = _warm(size, works)
        detail[f"products, {rows} rows"] = taken
        for kind in kinds:
            if kind == "float32":
                continue
            yield at_least(
                f"products of all matrices, {rows} rows: packed float32 / {kind}",
                _ratio(taken, "float32", kind),
                MIN_GAIN,
                "x",
                beside=_medians({each: taken[each] for each in ("float32", kind)}, "ms"),
            )
    if not find_spec("torchao"):
        yield reported("int8 of torchao: it is not installed", float("nan"), "")


def _packed(weights: list[Any], dtype: Any) -> Products:
    from serving.engines.torch_engine.linear import Linear

    return _products([Linear(weight.detach().to(dtype), None) for weight in weights], dtype)


def _dynamic(weights: list[Any]) -> Products:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch recommends torchao
        quantised = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
            _modules(weights), {torch.nn.Linear}, dtype=torch.qint8
        )
    return _products(list(quantised), torch.float32, [tuple(weight.shape) for weight in weights])


def _torchao(weights: list[Any]) -> dict[str, Products]:
    if not find_spec("torchao"):
        return {}
    import torch
    from torchao.quantization import (
        Int8DynamicActivationInt8WeightConfig,
        Int8WeightOnlyConfig,
        quantize_,
    )

    shapes = [tuple(weight.shape) for weight in weights]
    found = {}
    for kind, config, dtype in (
        ("int8 weights of torchao", Int8WeightOnlyConfig(), torch.bfloat16),
        ("int8 of torchao", Int8DynamicActivationInt8WeightConfig(), torch.float32),
    ):
        modules = _modules(weights).to(dtype)
        quantize_(modules, config)
        found[kind] = _products(list(modules), dtype, shapes)
    return found


def _modules(weights: list[Any]) -> Any:
    import torch

    modules = torch.nn.Sequential()
    for weight in weights:
        module = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        module.weight = torch.nn.Parameter(weight.detach().clone(), requires_grad=False)
        modules.append(module)
    return modules


def _products(
    linears: list[Any], dtype: Any, shapes: list[tuple[int, ...]] | None = None
) -> Products:
    import torch

    widths = [columns for _, columns in shapes or [linear.shape for linear in linears]]

    def multiply(rows: int) -> None:
        inputs = {width: torch.ones(rows, width, dtype=dtype) for width in set(widths)}
        for linear, width in zip(linears, widths, strict=True):
            linear(inputs[width])

    return multiply


def _head(network: Any, size: Size, detail: dict[str, Any]) -> Iterator[Figure]:
    import torch

    from serving.engines.torch_engine.linear import Linear

    embedding = network.get_input_embeddings().weight.detach()
    packed = Linear(embedding, None)
    mebibytes = embedding.nbytes / 2**20
    for rows in size.rows:
        x = torch.ones(rows, embedding.shape[1])
        taken = _warm(
            size,
            {
                "packed": partial(_milliseconds, partial(packed, x), size),
                "plain": partial(
                    _milliseconds, partial(torch.nn.functional.linear, x, embedding), size
                ),
            },
        )
        detail[f"head, {rows} rows"] = taken
        yield at_least(
            f"one copy of a tied head, {rows} rows: packed / plain",
            _ratio(taken, "packed", "plain"),
            MIN_ELSEWHERE,
            "x",
            beside=f"{_medians(taken, 'ms')}; it saves {mebibytes:,.0f} MiB",
        )


def _without_http(
    home: Path, release: Published, size: Size, detail: dict[str, Any]
) -> Iterator[Figure]:
    prompts = (
        Prompts(release.folder)
        if size.shape == PRETRAINED
        else map(partial(prompt_of, length=size.prompt_tokens), itertools.count(1))
    )
    with (
        serving("torch", release, home) as server,
        _engine(release) as ask_engine,
        ThreadPoolExecutor(size.clients) as pool,
    ):

        def rate(ask: Callable[[list[list[int]]], None]) -> float:
            started, count = time.perf_counter(), 0
            while True:
                taken = (
                    prompts.take(size.clients, size.prompt_tokens)
                    if isinstance(prompts, Prompts)
                    else itertools.islice(prompts, size.clients)
                )
                ask(list(taken))
                count += size.clients * size.tokens
                if (seconds := time.perf_counter() - started) >= size.turn_seconds:
                    return count / seconds

        def ask_server(asked: list[list[int]], server: Server = server) -> None:
            list(pool.map(lambda prompt: server.ask(prompt, size.tokens), asked))

        rates = _warm(
            size,
            {
                "over HTTP": partial(rate, ask_server),
                "engine alone": partial(rate, partial(ask_engine, tokens=size.tokens)),
            },
        )
    detail["without HTTP"] = rates
    yield at_least(
        f"the engine alone / over HTTP, {size.clients} clients",
        _ratio(rates, "engine alone", "over HTTP"),
        MIN_GAIN,
        "x",
        beside=_medians(rates, "tokens/s"),
    )


@contextmanager
def _engine(release: Published) -> Iterator[Callable[..., None]]:
    """A function that generates so many tokens for each prompt, all together, in this process."""
    from serving.completions import MAX_STEP_TOKENS
    from serving.engine import Generation
    from serving.engines.torch_engine.engine import TorchEngine
    from serving.engines.torch_engine.settings import TorchEngineSettings
    from serving.weights.release_store import load_release

    async def started() -> TorchEngine:
        engine = TorchEngine(TorchEngineSettings())
        await engine.stage(load_release(release.folder), release.folder)
        await engine.commit(release.release_id)
        return engine

    async def one(prompt: list[int], tokens: int) -> None:
        generation = Generation(
            prompt=tuple(prompt),
            max_tokens=tokens,
            temperature=0.0,
            max_step_tokens=MAX_STEP_TOKENS,
        )
        async for _ in engine.generate(release.release_id, generation):
            pass

    async def every(prompts: list[list[int]], tokens: int) -> None:
        await asyncio.gather(*(one(prompt, tokens) for prompt in prompts))

    with asyncio.Runner() as runner:
        engine = runner.run(started())
        try:
            yield lambda prompts, tokens: runner.run(every(prompts, tokens))
        finally:
            runner.run(engine.close())


def _warm(size: Size, works: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The rounds of each, without the first, which warms up."""
    found = in_turns(size.rounds + 1, works)
    return {name: values[1:] for name, values in found.items()}


def _milliseconds(work: Callable[[], object], size: Size) -> float:
    """Of one call."""
    started, count = time.perf_counter(), 0
    while count == 0 or time.perf_counter() - started < size.turn_seconds:
        work()
        count += 1
    return 1000 * (time.perf_counter() - started) / count


def _ratio(rounds: Mapping[str, list[float]], above: str, below: str) -> float:
    pairs = zip(rounds[above], rounds[below], strict=True)
    return statistics.median(first / second for first, second in pairs)


def _medians(rounds: Mapping[str, list[float]], unit: str) -> str:
    found = (f"{name} {statistics.median(values):,.3g}" for name, values in rounds.items())
    return f"{', '.join(found)} {unit}"


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
