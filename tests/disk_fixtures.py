"""A small disk that a test can fill. It is a tmpfs, which only root may mount."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        pytest.skip(f"mount is not permitted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(disk: Path, *, leave: int) -> None:
    (disk / "filler").unlink(missing_ok=True)
    left = shutil.disk_usage(disk).free - leave
    with (disk / "filler").open("wb", buffering=0) as file:
        while left > 0 and shutil.disk_usage(disk).free > 0:
            left -= file.write(bytes(min(left, 4096)))
