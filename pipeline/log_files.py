"""Limits the size of the log files of a stack's services."""

import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
NUM_KEPT = 3
"""How many older parts of a log are kept, in the same folder as the log. The newest older part of
`hub.log` is `hub.log.1`."""


def rotate(log: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """If the log is larger than `max_bytes`, move its content to a file with the suffix `.1`.
    Before that, rename the older parts: `.1` becomes `.2`, and so on. The oldest part is
    overwritten.

    The service keeps the log open, so renaming the log would not stop the service from writing to
    the same file. Instead, the content is copied, and then the log is emptied. The service must
    have opened the log for appending, so that it continues at the start of the empty file. Lines
    that the service writes after the copying and before the emptying are lost.
    """
    try:
        if log.stat().st_size <= max_bytes:
            return
        for number in range(NUM_KEPT - 1, 0, -1):
            older = _part(log, number)
            if older.exists():
                older.replace(_part(log, number + 1))
        with log.open("r+b") as source, _part(log, 1).open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
            source.truncate(0)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("%s cannot be rotated: %s", log, error.strerror)


def _part(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
