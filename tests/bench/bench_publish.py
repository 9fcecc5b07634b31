"""Publish a release from memory, beside one write and fsync of the same bytes.

Publishing writes shards, index and manifest, hashes each file and each tensor, and
fsyncs all of it. Memory is measured in a process that does nothing else.
"""

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from blake3 import blake3

from tests.bench.result import Result, at_least, at_most, reported, run_program
from tests.bench.timing import in_turns, seconds_of

MIB = 2**20
FILES = {"config.json": '{"model_type": "bench"}'}


@dataclass(frozen=True, kw_only=True)
class Size:
    mib: int
    shard_mib: int
    rounds: int


FULL = Size(mib=350, shard_mib=64, rounds=15)
SMALL = Size(mib=8, shard_mib=2, rounds=1)
SPEED, TENSOR_MIB = 0.7, 4
HASHES = (hashlib.sha256, blake3)


def measure(size: Size) -> Result:
    """Publish a release of several shards, against one write and fsync of the same bytes."""
    import torch

    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        tensors = _tensors(size)
        content = torch.cat([tensor.view(-1) for tensor in tensors.values()]).numpy().data
        taken = in_turns(
            size.rounds + 1,
            {
                "write": lambda: _after_a_sync(lambda: _write(home / "plain", content)),
                "publish": lambda: _after_a_sync(lambda: _publish(home, tensors, size)),
                "least": lambda: _after_a_sync(
                    lambda: _write_beside_hashes(home / "least", content)
                ),
            },
        )
        # The first round warms up.
        write, publish, least = (taken[each][1:] for each in ("write", "publish", "least"))
        sha256, of_tensors = (
            size.mib / seconds_of(partial(hash, content.cast("B"))) for hash in HASHES
        )
        above, allowed = _memory(home, size)
        filesystem = _filesystem(home)
    ratio = statistics.median(write) / statistics.median(publish)
    return Result(
        figures=(
            at_least("speed against one write + fsync", ratio, SPEED, "x"),
            at_most("resident memory above the start", above / MIB, allowed / MIB, "MiB"),
            reported(
                "the same write beside bare hashes of the bytes, against it alone",
                statistics.median(write) / statistics.median(least),
                "x",
            ),
            reported("publish", size.mib / statistics.median(publish), "MiB/s"),
            reported("one write + fsync", size.mib / statistics.median(write), "MiB/s"),
            reported("sha256 alone", sha256, "MiB/s"),
            reported("blake3 alone", of_tensors, "MiB/s"),
        ),
        bounded_by=(
            "the disk and the processor: the sha256 of each file and the BLAKE3 of each tensor, on "
            f"threads beside the write, on {os.cpu_count()} cores"
        ),
        detail={
            "write": write,
            "publish": publish,
            "least": least,
            "filesystem": filesystem,
            "mib": size.mib,
        },
    )


def _tensors(size: Size) -> dict[str, Any]:
    import torch

    torch.manual_seed(0)
    elements = TENSOR_MIB * MIB // 4
    return {
        f"layer.{number:03d}.weight": torch.randn(elements).view(-1, 1024)
        for number in range(max(1, size.mib // TENSOR_MIB))
    }


def _after_a_sync(work: Any) -> float:
    # What the last round left to the disk is not this one's.
    os.sync()
    return seconds_of(work)


def _write(path: Path, content: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        left = content.cast("B")
        while left:
            left = left[os.write(descriptor, left) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
        path.unlink()


def _write_beside_hashes(path: Path, content: memoryview) -> None:
    """What no publisher that proves files and tensors can be quicker than, on two cores."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        for hash in HASHES:
            pool.submit(hash, content.cast("B"))
        _write(path, content)


def _publish(home: Path, tensors: dict[str, Any], size: Size) -> None:
    from serving.weights.publish import publish_state_dict

    files = home / "files"
    files.mkdir(exist_ok=True)
    for name, text in FILES.items():
        (files / name).write_text(text)
    publish_state_dict(
        home / "releases", tensors, files_dir=files, max_shard_bytes=size.shard_mib * MIB
    )
    shutil.rmtree(home / "releases")


def _memory(home: Path, size: Size) -> tuple[int, int]:
    """Bytes above the start at the peak, and those that are allowed: the model and one shard."""
    command = [sys.executable, "-m", __spec__.name, str(home / "memory"), str(size.mib)]
    command.append(str(size.shard_mib))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout), (size.mib + size.shard_mib) * MIB


def _peak_above_start(home: Path, size: Size) -> int:
    import serving.weights.publish
    import serving.weights.shards

    assert serving.weights.publish and serving.weights.shards
    # The first product of a process makes its thread pool.
    _tensors(Size(mib=TENSOR_MIB, shard_mib=1, rounds=0))
    home.mkdir()
    start = _resident_bytes("VmRSS")
    _publish(home, _tensors(size), size)
    return _resident_bytes("VmHWM") - start


def _resident_bytes(field: str) -> int:
    """Not `ru_maxrss`, which a child inherits from the process that started it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _filesystem(folder: Path) -> str:
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text().splitlines()]
    holding = [each for each in mounts if folder.is_relative_to(each[0])]
    return max(holding, key=lambda each: len(each[0]))[1]


if __name__ == "__main__":
    if len(sys.argv) == 4 and sys.argv[2].isdigit():
        given = Size(mib=int(sys.argv[2]), shard_mib=int(sys.argv[3]), rounds=0)
        print(_peak_above_start(Path(sys.argv[1]), given))
    else:
        run_program(measure, full=FULL, small=SMALL)
