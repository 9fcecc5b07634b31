"""What a swap reads of a release in which a tenth of the tensors changed.

Three releases follow each other: the second differs from the first in every tenth tensor, all over
the layers and shards, the third from the second in a tenth of them in a row. Bytes are those that
the server's processes read by system calls (`rchar` of proc(5)), taken apart by the time at which
the preflight ended, and beside them those that the engine says it staged: a mapped file is read
without a call.
"""

import re
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from tests.bench.networks import Published, build, publish
from tests.bench.result import Figure, Result, at_most, reported, run_program
from tests.bench.server import Server, ServerName, pipeline_dir, serving


@dataclass(frozen=True, kw_only=True)
class Size:
    shape: str
    engines: tuple[str, ...]


FULL = Size(shape="88M", engines=("torch", "vllm"))
SMALL = Size(shape="tiny", engines=("torch",))
EVERY = 10
SHARDS = 10
TARGET_PERCENT = 15.0
SAMPLE_SECONDS = 0.002
STAGED = re.compile(r"read (\d+) bytes")


@dataclass(frozen=True, kw_only=True)
class Read:
    preflight: int
    later_calls: int
    """By system calls, after the preflight."""
    staged: int
    """As the engine's log says."""

    @property
    def staging(self) -> int:
        return self.later_calls + self.staged


@dataclass(frozen=True, kw_only=True)
class Change:
    which: str
    release: Published
    num_bytes: int
    """Of the tensors that changed."""


def measure(size: Size) -> Result:
    """Bytes read to swap in a release in which a tenth of the tensors changed."""
    figures: list[Figure] = []
    detail: dict[str, Any] = {}
    for engine in size.engines:
        if engine not in get_args(ServerName):
            raise ValueError(f"no engine {engine!r}")
        with tempfile.TemporaryDirectory() as name:
            home = Path(name)
            first, changes = _releases(size.shape, pipeline_dir(home))
            whole = sum(file.stat().st_size for file in first.folder.glob("*.safetensors"))
            with serving(engine, first, home) as server:
                reads = {change.which: _swap(server, change.release) for change in changes}
        for change in changes:
            read = reads[change.which]
            figures += _figures(f"{engine}, {change.which}", read, change.num_bytes, whole)
        detail[engine] = {which: asdict(read) for which, read in reads.items()}
    return Result(
        figures=tuple(figures),
        bounded_by="the tensors whose digest is another; beside them the preflight reads headers, "
        "tokenizer and manifest",
        detail=detail,
    )


def _figures(what: str, read: Read, changed: int, whole: int) -> list[Figure]:
    unit = "% of the release"

    def percent(part: int) -> float:
        return 100 * part / whole

    return [
        at_most(
            f"{what}: bytes read", percent(read.preflight + read.staging), TARGET_PERCENT, unit
        ),
        at_most(f"{what}: bytes read by staging", percent(read.staging), TARGET_PERCENT, unit),
        reported(f"{what}: bytes read by the preflight", percent(read.preflight), unit),
        reported(f"{what}: size of these tensors", percent(changed), unit),
    ]


def _releases(shape: str, folder: Path) -> tuple[Published, list[Change]]:
    """The first, and those that change something of the one before."""
    import torch

    network = build(shape, 1)
    names = [name for name, _ in network.named_parameters()]
    share = max(1, len(names) // EVERY)
    middle = len(names) // 2
    chosen = {
        "every tenth tensor changed": names[::EVERY],
        "neighbouring tensors changed": names[middle:][:share],
    }
    shard_bytes = max(1, sum(each.nbytes for each in network.parameters()) // SHARDS)
    first = publish(network, folder, max_shard_bytes=shard_bytes)
    changes = []
    for which, changed in chosen.items():
        with torch.no_grad():
            for name in changed:
                network.get_parameter(name).mul_(1.01)
        num_bytes = sum(network.get_parameter(name).nbytes for name in changed)
        release = publish(network, folder, max_shard_bytes=shard_bytes)
        changes.append(Change(which=which, release=release, num_bytes=num_bytes))
    return first, changes


def _swap(server: Server, release: Published) -> Read:
    pids = server.processes()
    samples: list[tuple[float, int]] = []
    is_over = threading.Event()

    def sample() -> None:
        while not is_over.is_set():
            samples.append((time.perf_counter(), _read_bytes(pids)))
            time.sleep(SAMPLE_SECONDS)

    said = len(server.log.read_bytes())
    sampling = threading.Thread(target=sample)
    sampling.start()
    time.sleep(5 * SAMPLE_SECONDS)
    started = time.perf_counter()
    try:
        result = server.swap(release.release_id)
    finally:
        is_over.set()
        sampling.join()
    ended = time.perf_counter()
    samples.append((ended, _read_bytes(pids)))
    before = [count for at, count in samples if at <= started][-1]
    phases = result["seconds"]
    checked = ended - sum(phases.values()) + phases["preflight"]
    after_preflight = next(count for at, count in samples if at >= min(checked, samples[-1][0]))
    staged = STAGED.findall(server.log.read_bytes()[said:].decode(errors="replace"))
    return Read(
        preflight=after_preflight - before,
        later_calls=samples[-1][1] - after_preflight,
        staged=int(staged[-1]) if staged else 0,
    )


def _read_bytes(pids: list[int]) -> int:
    total = 0
    for pid in pids:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        total += int(next(line.split()[1] for line in lines if line.startswith("rchar")))
    return total


if __name__ == "__main__":
    run_program(measure, full=FULL, small=SMALL)
