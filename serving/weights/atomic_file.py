"""Replaces the content of one file. At any time, even after a power cut, a reader finds either the
complete old content or the complete new content.

The new content is written to a temporary file in the same folder, and this file is fsynced. Then
the temporary file is renamed to the name of the old file, and so replaces it.
"""

import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

REPLACING = ".replacing-"
"""A new file or link has a temporary name until it replaces the old one. The temporary name begins
with this prefix."""
_ABANDONED_SECONDS = 60.0
"""After this time, a temporary file or link counts as abandoned, because its writer was probably
killed."""


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Yields a temporary file to write to. When the `with` block ends, this file replaces `path`.

    If the block raises an error, `path` does not change and the temporary file is removed. Raises
    OSError if the disk fails.
    """
    replacement = replacement_path(path.parent)
    try:
        with replacement.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(replacement, path)
    except BaseException:
        replacement.unlink(missing_ok=True)
        raise
    fsync(path.parent)


def write_atomically(path: Path, text: str) -> None:
    """Replace the content of `path` with `text`, in UTF-8. Raises OSError."""
    with atomic_file(path) as file:
        file.write(text.encode())


def link_atomically(link: Path, target: str) -> None:
    """Make `link` a symbolic link to `target`. If `link` already points at `target`, nothing is
    written, so the call also succeeds on a full disk. An existing link or file is replaced
    atomically.

    The link survives a power cut only after `fsync`, which the caller must call. One call is
    enough for all links in a folder.
    """
    if link.is_symlink() and os.readlink(link) == target:
        return
    replacement = replacement_path(link.parent)
    os.symlink(target, replacement)
    os.replace(replacement, link)


def replacement_path(folder: Path) -> Path:
    return folder / f"{REPLACING}{uuid.uuid4().hex[:8]}"


def is_abandoned(entry: Path) -> bool:
    """Whether `entry` is a temporary file or link whose writer was probably killed before the
    rename.

    This function cannot find out whether the writer still runs, because some writers hold no lock.
    So it decides by the age of the entry. Use it only in folders where all temporary files are
    small: the writer of a large file, such as a checkpoint, may pause for more than a minute, and
    the file would then count as abandoned.
    """
    if not entry.name.startswith(REPLACING):
        return False
    try:
        return time.time() - entry.lstat().st_mtime > _ABANDONED_SECONDS
    except FileNotFoundError:
        return False


def fsync(path: Path) -> None:
    """Make the content of a file, or the renames in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
