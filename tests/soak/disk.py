"""A file that fills the disk of a stack for a moment."""

import contextlib
import os
import shutil
import time
from pathlib import Path

FULL_SECONDS = 2.0
"""Shorter than the wait of a job that failed for it: its next attempt finds room."""


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
