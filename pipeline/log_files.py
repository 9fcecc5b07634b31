"""Limits the size of the log files of a stack (the services that `pipeline up` starts)."""

import contextlib
import logging
import shutil
from pathlib import Path

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
NUM_KEPT = 3
"""How many older parts of a log are kept, in the same folder as the log. For example, `hub.log.1`
has the newest lines that are no longer in `hub.log`, and `hub.log.2` has older lines."""


def rotate(log: Path, *, max_bytes: int = MAX_BYTES) -> None:
    """If the log is larger than `max_bytes`, move its content to a file with the suffix `.1`.
    Before that, rename the older parts: `.1` becomes `.2`, and so on. The oldest part is
    overwritten. If the disk is full, the log and its older parts stay as they are.

    This function does not rename the log itself: the service keeps the log open, and would continue
    to write to the renamed file. Instead, this function copies the content, and then empties the
    log. Lines that the service writes between the copy and the emptying are lost. The service must
    have opened the log for appending. Otherwise, the service would write its next line at the old
    end of the log, and the log would have a gap before this line.
    """
    draft = log.with_name(f".{log.name}.copy")
    try:
        if log.stat().st_size <= max_bytes:
            return
        with log.open("r+b") as source:
            # Rename the older parts only after the copy is complete. The copy fails if the disk is
            # full, and `up` tries again every few seconds. If each try renamed the older parts
            # first, a few tries would delete all of them.
            with draft.open("wb") as target:
                shutil.copyfileobj(source, target, 2**20)
            for number in range(NUM_KEPT - 1, 0, -1):
                older = _part(log, number)
                if older.exists():
                    older.replace(_part(log, number + 1))
            draft.replace(_part(log, 1))
            source.truncate(0)
    except FileNotFoundError:
        return
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        logger.warning("%s cannot be rotated: %s", log, error.strerror)


def _part(log: Path, number: int) -> Path:
    return log.with_name(f"{log.name}.{number}")
