"""The torch engine on a GPU: random weights in bfloat16, of 1 B and 8 B parameters.

Tokens per second of some streams at once; what they see of swaps between two releases in which
every tensor differs; how fast such a release is staged, beside one copy of pinned memory to the
device, which is all that it could be. Without a GPU there is nothing to measure.
"""

import itertools
import re
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.bench.networks import build, publish
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.server import Server, pipeline_dir, serving
from tests.bench.streams import Span, inside, streams
from tests.bench.timing import percentile, seconds_of


@dataclass(frozen=True, kw_only=True)
class Size:
    shapes: tuple[str, ...]
    device: str
    dtype: str
    streams: tuple[int, ...]
    tokens: int
    """Of each stream."""


FULL = Size(shapes=("1B", "8B"), device="cuda", dtype="bfloat16", streams=(1, 4, 16), tokens=900)
SMALL = Size(shapes=("tiny",), device="cpu", dtype="float32", streams=(1, 2), tokens=300)
USUAL_FACTOR, EXTRA_MS = 2.0, 50.0
STAGED = re.compile(r"staged \S+ in ([\d.]+) s: read (\d+) bytes")
COPIED_BYTES, COPIES = 1 << 28, 5


def measure(size: Size) -> Result:
    """Tokens per second, gaps during swaps, and staging, of the torch engine on a GPU."""
    import torch

    if size.device == "cuda" and not torch.cuda.is_available():
        return Result(figures=(), bounded_by="nothing was measured: this machine has no GPU")
    ceiling = _copied_per_second(size.device)
    figures = [reported("one copy from pinned memory to the device", ceiling / 1e9, "GB/s")]
    detail: dict[str, Any] = {"device": _name(size.device)}
    for shape in size.shapes:
        found, detail[shape] = _measure(shape, size, ceiling)
        figures += found
    return Result(
        figures=tuple(figures),
        bounded_by=f"on {detail['device']}: steps by launches of small kernels where few streams "
        "run; staging by the BLAKE3 of each tensor on one core",
        detail=detail,
    )


def _measure(shape: str, size: Size, ceiling: float) -> tuple[list[Figure], dict[str, Any]]:
    settings = f'[serving]\ndtype = "{size.dtype}"\n[serving.torch]\ndevice = "{size.device}"\n'
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        first, second = (
            publish(build(shape, seed, size.dtype), pipeline_dir(home)) for seed in (1, 2)
        )
        with serving("torch", first, home, settings) as server:
            streams(server, max(size.streams), 20, None)
            quiet = {many: streams(server, many, size.tokens, None)[0] for many in size.streams}
            others = itertools.cycle([second.release_id, first.release_id])
            many = size.streams[-1]
            gaps, swaps = streams(server, many, size.tokens, lambda: _swap(server, next(others)))
            staged = STAGED.findall(server.log.read_text(errors="replace"))
    if not swaps:
        raise RuntimeError("no swap ended before the streams did")
    usual = 1e3 * percentile([after - before for before, after in quiet[many]], 0.5)
    in_swaps = inside(gaps, swaps)
    rates = [int(num_bytes) / float(seconds) for seconds, num_bytes in staged if float(seconds)]
    figures = [
        *(
            reported(f"{shape}: {many} streams", _tokens_per_second(quiet[many], many), "tokens/s")
            for many in size.streams
        ),
        at_most(
            f"{shape}: largest gap during a swap, {many} streams",
            max(in_swaps, default=float("nan")),
            USUAL_FACTOR * usual + EXTRA_MS,
            "ms",
        ),
        reported(f"{shape}: median time between tokens, {many} streams", usual, "ms"),
    ]
    if rates:
        rate = statistics.median(rates)
        figures += [
            reported(f"{shape}: staging", rate / 1e9, "GB/s"),
            reported(f"{shape}: staging, of that copy", 100 * rate / ceiling, "%"),
        ]
    return figures, {"swaps": len(swaps), "staging_bytes_per_second": rates}


def _swap(server: Server, release_id: str) -> None:
    server.swap(release_id)


def _tokens_per_second(gaps: list[Span], many: int) -> float:
    """Of all streams together, between their first and their last token."""
    return many / statistics.mean(after - before for before, after in gaps)


def _copied_per_second(device: str) -> float:
    """Bytes, of one large copy; the median of some."""
    import torch

    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=device == "cuda")
    target = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)

    def copy() -> None:
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()

    copy()
    return COPIED_BYTES / statistics.median(seconds_of(copy) for _ in range(COPIES))


def _name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device == "cuda" else device


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
