"""Keeps the log files of a stack's services from growing without end."""

import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
NUM_KEPT = 3
"""How many older parts of a log are kept beside it: `hub.log.1` is the newest of them."""


def rotate(log: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """If the log is larger than `max_bytes`, move what is in it to `.1`, and older parts on.

    The service holds the file open, so the content is copied and the file emptied. The file must
    have been opened for appending: the service then goes on writing at its start. Of what is
    written meanwhile, the lines of one moment may be lost: between the last read and the cut.
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
