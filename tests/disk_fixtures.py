"""A small disk that a test can fill. It is a tmpfs, which only root may mount."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def mount(*arguments: str) -> str | None:
    """Returns why it is not possible."""
    if shutil.which("mount") is None:
        return "there is no command `mount`"
    done = subprocess.run(["mount", *arguments], capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stderr.strip()


def mount_or_skip(*arguments: str) -> None:
    if why_not := mount(*arguments):
        pytest.skip(f"mount is not permitted here: {why_not}")


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def small_disk(folder: Path, size: str = "20m") -> Iterator[Path]:
    folder.mkdir()
    mount_or_skip("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        unmount(folder)


def fill(disk: Path, *, leave: int) -> None:
    (disk / "filler").unlink(missing_ok=True)
    left = shutil.disk_usage(disk).free - leave
    with (disk / "filler").open("wb", buffering=0) as file:
        while left > 0 and shutil.disk_usage(disk).free > 0:
            left -= file.write(bytes(min(left, 4096)))
