"""Streams side by side, the gaps between their tokens, and what disturbs them meanwhile."""

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from tests.bench.networks import PROMPT_TOKENS, prompt_of
from tests.bench.server import Server

Span = tuple[float, float]
"""When something began and ended, in seconds on one clock."""


def streams(
    server: Server, num_streams: int, tokens: int, disturb: Callable[[], None] | None
) -> tuple[list[Span], list[Span]]:
    """Gaps of all streams, and the spans of what disturbed them, again and again, until the first
    stream ended."""
    moments: list[list[float]] = [[] for _ in range(num_streams)]
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

    with ThreadPoolExecutor(num_streams + 1) as pool:
        running = [pool.submit(stream, number) for number in range(num_streams)]
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


def inside(gaps: Sequence[Span], spans: Sequence[Span]) -> list[float]:
    """Milliseconds of the gaps that share time with one of the spans."""
    return [
        1e3 * (after - before)
        for before, after in gaps
        if any(before < end and start < after for start, end in spans)
    ]
