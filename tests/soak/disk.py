"""A small disk for the state of a stack, and a file that fills it. Only root may mount one."""

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

DISK = ("-t", "tmpfs", "-o", "size=512m", "tmpfs")
FULL_SECONDS = 2.0
"""Shorter than the wait of a job that failed for it: its next attempt finds room."""


def mount_small(folder: Path) -> str | None:
    """Put a disk of its own below the folder; returns why that is not possible."""
    folder.mkdir(parents=True, exist_ok=True)
    if shutil.which("mount") is None:
        return "there is no command `mount`"
    done = subprocess.run(
        ["mount", *DISK, str(folder)], capture_output=True, text=True, check=False
    )
    return None if done.returncode == 0 else done.stderr.strip()


def unmount(folder: Path) -> None:
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> None:
    """For `FULL_SECONDS` the disk has no room, not even for what is written meanwhile."""
    filler = folder / "filler"
    end = time.monotonic() + FULL_SECONDS
    try:
        with filler.open("wb", buffering=0) as file:
            # Others may remove files of theirs.
            while time.monotonic() < end:
                free = shutil.disk_usage(folder).free
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), max(free, 1))
                time.sleep(0.01)
    finally:
        filler.unlink()
