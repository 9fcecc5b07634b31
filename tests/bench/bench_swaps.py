"""Many swaps under load: none fails, no answer is mixed, and memory does not grow.

Clients ask greedy prompts, whole and streamed, of which each release's right text is known from
`transformers`. An answer is mixed when its text is not that of the release that it names.

`--shape SmolLM2 --swaps 100 --clients 16 --tokens 24 --prompts 8` swaps between a pretrained model
and a changed copy of it. Every eighth prompt then has 1,000 tokens, the others 32.
"""

import itertools
import json
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.bench.networks import Published, build, prompt_of, publish, right_texts
from tests.bench.prompts import Prompts
from tests.bench.result import Result, at_most, reported, run_program
from tests.bench.server import Server, pipeline_dir, request_body, serving
from tests.bench.timing import percentile
from tests.smollm2 import checkpoint_folder


@dataclass(frozen=True, kw_only=True)
class Size:
    shape: str
    swaps: int
    clients: int
    tokens: int
    """Of each answer."""
    prompts: int


FULL = Size(shape="7M", swaps=1_000, clients=4, tokens=24, prompts=6)
SMALL = Size(shape="tiny", swaps=16, clients=2, tokens=8, prompts=2)
PROMPT_TOKENS = 48
"""Of the prompts for a random network. The prefix cache shares no fewer than 16 tokens."""
PRETRAINED = "SmolLM2"
LENGTHS = (1_000, *[32] * 7)
"""Of the prompts for the pretrained model, in turns."""
SETTLED = 10
"""Swaps until memory is what it stays."""
SAMPLES = 5
GROWTH_PERCENT = 5.0


def measure(size: Size) -> Result:
    """Swaps under load on the torch engine: failed, mixed, memory."""
    if size.swaps < SETTLED + SAMPLES:
        raise ValueError(f"--swaps must be at least {SETTLED + SAMPLES}, not {size.swaps}")
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        if size.shape == PRETRAINED:
            published = pretrained(home)
            prompts, texts = right_texts(published, size.prompts, size.tokens, _real_prompts())
        else:
            published = [publish(build(size.shape, seed), pipeline_dir(home)) for seed in (1, 2)]
            candidates = (
                prompt_of(seed, PROMPT_TOKENS) for seed in range(1, 1 + 40 * size.prompts)
            )
            prompts, texts = right_texts(published, size.prompts, size.tokens, candidates)
        resident: list[int] = []
        seconds: list[float] = []
        gaps: list[float] = []
        stop = threading.Event()
        with (
            serving("torch", published[0], home) as server,
            ThreadPoolExecutor(size.clients) as pool,
        ):
            asking = [
                pool.submit(_ask_until, stop, server, prompts, texts, size.tokens, number, gaps)
                for number in range(size.clients)
            ]
            try:
                for number in range(1, size.swaps + 1):
                    started = time.perf_counter()
                    server.swap(published[number % 2].release_id)
                    seconds.append(time.perf_counter() - started)
                    resident.append(_resident_bytes(server.pid))
            finally:
                stop.set()
            counts = sum((each.result() for each in asking), Counter[str]())
    early = statistics.median(resident[SETTLED - 1 : SETTLED - 1 + SAMPLES])
    late = statistics.median(resident[-SAMPLES:])
    return Result(
        figures=(
            at_most("failed requests", counts["failed"], 0, ""),
            at_most("answers that mix two releases", counts["mixed"], 0, ""),
            at_most(
                "growth of memory from the tenth swap to the end",
                100 * (late / early - 1),
                GROWTH_PERCENT,
                "%",
            ),
            reported("number of swaps", size.swaps, ""),
            reported("right answers during the swaps", counts["right"], ""),
            reported(
                "prompt tokens from the prefix cache",
                100 * counts["cached tokens"] / max(1, counts["prompt tokens"]),
                "%",
            ),
            reported("memory after the tenth swap", early / 2**20, "MiB"),
            reported("time of a swap, median", statistics.median(seconds), "s"),
            reported("time of a swap, longest", max(seconds), "s"),
            reported("gap between two tokens of a stream, median", percentile(gaps, 0.5), "ms"),
            reported("gap between two tokens of a stream, p99", percentile(gaps, 0.99), "ms"),
        ),
        bounded_by="a swap takes as long as the digests and the staging of the release beside "
        "requests",
        detail={"resident_bytes": resident[:: max(1, len(resident) // 200)], "counts": counts},
    )


def pretrained(home: Path) -> list[Published]:
    """SmolLM2-135M-Instruct, and a copy of which one matrix in each layer is a little larger."""
    import torch
    from transformers import AutoModelForCausalLM

    from pipeline.retrain.export import make_probe

    folder = checkpoint_folder()
    probe_texts = [tuple(text) for text in Prompts(folder).take(4, 64)]
    published = []
    for factor in (1.0, 1.02):
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.no_grad():
            for layer in network.model.layers:
                layer.mlp.down_proj.weight.mul_(factor)
        probe = make_probe(network, probe_texts)
        published.append(publish(network, pipeline_dir(home), tokenizer_of=folder, probe=probe))
    return published


def _real_prompts() -> Iterator[list[int]]:
    prompts = Prompts(checkpoint_folder())
    for length in itertools.islice(itertools.cycle(LENGTHS), 1_000):
        yield from prompts.take(1, length)


def _ask_until(
    stop: threading.Event,
    server: Server,
    prompts: list[list[int]],
    texts: Mapping[tuple[str, int], str],
    tokens: int,
    number: int,
    gaps: list[float],
) -> "Counter[str]":
    """`gaps` gets the milliseconds between the tokens of the streams."""
    counts = Counter[str]()
    with httpx.Client(base_url=server.url, timeout=120) as http:
        while not stop.is_set():
            number += 1
            which = number % len(prompts)
            try:
                found = _answer(http, prompts[which], tokens, gaps if number % 2 == 0 else None)
            except (httpx.HTTPError, ValueError, KeyError) as error:
                print(f"failed: {error!r}", flush=True)
                counts["failed"] += 1
                continue
            release, text, usage = found
            counts["right" if text == texts[release, which] else "mixed"] += 1
            counts["prompt tokens"] += usage["prompt_tokens"]
            counts["cached tokens"] += usage["prompt_tokens_details"]["cached_tokens"]
    return counts


def _answer(
    http: httpx.Client, prompt: list[int], tokens: int, gaps: list[float] | None
) -> tuple[str, str, dict[str, Any]]:
    """The release that it names, its text and its usage; a stream if there is a list for its gaps.
    A stream that names two releases is a ValueError."""
    body = request_body(prompt, tokens)
    if gaps is None:
        answer = http.post("/v1/completions", json=body)
        answer.raise_for_status()
        found = answer.json()
        return found["system_fingerprint"], found["choices"][0]["text"], found["usage"]
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    releases, text, usage = set(), "", {}
    moments: list[float] = []
    with http.stream("POST", "/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                releases.add(event["system_fingerprint"])
                text += "".join(choice["text"] for choice in event["choices"])
                moments += [time.perf_counter()] * bool(event["choices"])
                usage = event["usage"]
    gaps += [1e3 * (after - before) for before, after in itertools.pairwise(moments)]
    (release,) = releases
    return release, text, usage


def _resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} is gone")


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
