"""What running streams see while the release is swapped, and while a long prompt arrives.

Some clients stream at once, first undisturbed: the median of their gaps is the usual inter-token
time. Then as many stream while the release is swapped back and forth until they end; only gaps that
lie in the time of a swap count. Then as many while prompts that fill the context arrive.
"""

import itertools
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.networks import CONTEXT, build, prompt_of, publish
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.server import pipeline_dir, serving
from tests.bench.streams import inside, streams
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
            streams(server, size.streams, 20, None)
            quiet, _ = streams(server, size.streams, size.tokens, None)
            swapped, swaps = streams(server, size.streams, size.tokens, swap)
            prompted, prompts = streams(server, size.streams, size.tokens, long_prompt)
    if not swaps:
        raise RuntimeError("no swap ended before the streams did")
    usual = 1e3 * percentile([after - before for before, after in quiet], 0.5)
    in_swaps = inside(swapped, swaps)
    in_prompts = inside(prompted, prompts)
    limit = USUAL_FACTOR * usual + EXTRA_MS
    figures = [
        at_most(f"{shape}: largest gap during a swap", max(in_swaps), limit, "ms"),
        reported(f"{shape}: median time between tokens, {size.streams} streams", usual, "ms"),
        reported(f"{shape}: p99 of the gaps during swaps", percentile(in_swaps, 0.99), "ms"),
        reported(
            f"{shape}: largest gap without a swap",
            1e3 * max(after - before for before, after in quiet),
            "ms",
        ),
        reported(f"{shape}: number of swaps while the streams ran", len(swaps), ""),
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


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
