"""What running streams see while the release is swapped, and while a long prompt arrives.

Some clients stream at once, first undisturbed: the median of their gaps is the usual inter-token
time. Then as many stream while the release is swapped back and forth until they end; only gaps that
lie in the time of a swap count. Then as many while prompts that fill the context arrive.
"""

import itertools
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.networks import CONTEXT, PROMPT_TOKENS, build, prompt_of, publish
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving
from tests.bench.timing import percentile


@dataclass(frozen=True, kw_only=True)
class Size:
    shapes: tuple[str, ...]
    streams: int
    tokens: int
    """Of each stream."""


FULL = Size(shapes=("7M", "88M"), streams=4, tokens=900)
SMALL = Size(shapes=("tiny",), streams=2, tokens=300)
USUAL_FACTOR, EXTRA_MS = 2.0, 50.0

Span = tuple[float, float]
"""When something began and ended, in seconds on one clock."""


def measure(size: Size) -> Result:
    """Gaps between the tokens of running streams during swaps, torch engine."""
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    for shape in size.shapes:
        found, detail[shape] = _measure(shape, size)
        figures += found
    return Result(
        figures=tuple(figures),
        bounded_by="staging reads and packs in slices on a thread of low priority, beside the "
        "steps; a long prompt is cut into pieces that take turns with the others' steps",
        detail=detail,
    )


def _measure(shape: str, size: Size) -> tuple[list[Figure], dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        first, second = (publish(build(shape, seed), pipeline_dir(home)) for seed in (1, 2))
        phases: list[dict[str, float]] = []
        with serving("torch", first, home) as server:
            others = itertools.cycle([second.release_id, first.release_id])

            def swap() -> None:
                phases.append(server.swap(next(others))["seconds"])

            def long_prompt() -> None:
                seed = time.perf_counter_ns() % 1_000_003
                server.ask(prompt_of(seed, CONTEXT - 8), 1)

            # The first round warms up.
            _streams(server, size, 20, None)
            quiet, _ = _streams(server, size, size.tokens, None)
            swapped, swaps = _streams(server, size, size.tokens, swap)
            prompted, prompts = _streams(server, size, size.tokens, long_prompt)
    if not swaps:
        raise RuntimeError("no swap ended before the streams did")
    usual = 1e3 * percentile([after - before for before, after in quiet], 0.5)
    in_swaps = _inside(swapped, swaps)
    in_prompts = _inside(prompted, prompts)
    limit = USUAL_FACTOR * usual + EXTRA_MS
    figures = [
        at_most(f"{shape}: largest gap during a swap", max(in_swaps), limit, "ms"),
        reported(f"{shape}: usual inter-token time, {size.streams} streams", usual, "ms"),
        reported(f"{shape}: p99 of the gaps during swaps", percentile(in_swaps, 0.99), "ms"),
        reported(
            f"{shape}: largest gap undisturbed",
            1e3 * max(after - before for before, after in quiet),
            "ms",
        ),
        reported(f"{shape}: swaps while the streams ran", len(swaps), ""),
        reported(
            f"{shape}: largest gap while a prompt of {CONTEXT - 8} tokens arrives",
            max(in_prompts, default=float("nan")),
            "ms",
        ),
    ]
    return figures, {
        "gaps_during_swaps": len(in_swaps),
        "gaps_above_the_limit": sum(gap > limit for gap in in_swaps),
        "swap_seconds": [end - start for start, end in swaps],
        "swap_phases": phases,
    }


def _streams(
    server: Server, size: Size, tokens: int, disturb: Callable[[], None] | None
) -> tuple[list[Span], list[Span]]:
    """Gaps of all streams, and the spans of what disturbed them, again and again, until the first
    stream ended."""
    moments: list[list[float]] = [[] for _ in range(size.streams)]
    is_over = threading.Event()

    def stream(number: int) -> None:
        try:
            seen = moments[number]
            seed = time.perf_counter_ns() % 1_000_003
            server.stream(
                prompt_of(seed, PROMPT_TOKENS), tokens, lambda: seen.append(time.perf_counter())
            )
        finally:
            is_over.set()

    def disturb_all() -> list[Span]:
        spans: list[Span] = []
        while disturb is not None and not is_over.is_set():
            started = time.perf_counter()
            disturb()
            if not is_over.is_set():
                spans.append((started, time.perf_counter()))
        return spans

    with ThreadPoolExecutor(size.streams + 1) as pool:
        running = [pool.submit(stream, number) for number in range(size.streams)]
        while not all(moments) and not is_over.is_set():
            time.sleep(0.01)
        disturbing = pool.submit(disturb_all)
        for each in running:
            each.result()
        spans = disturbing.result()
    for seen in moments:
        if len(seen) < tokens:
            raise RuntimeError(f"{len(seen)} events for {tokens} tokens: no measure of tokens")
    return [gap for seen in moments for gap in itertools.pairwise(seen)], spans


def _inside(gaps: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Milliseconds of the gaps that share time with one of the spans."""
    return [
        1e3 * (after - before)
        for before, after in gaps
        if any(before < end and start < after for start, end in spans)
    ]


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
