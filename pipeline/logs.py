"""Sets up the logging of a service: as text for people, or as JSON for programs. Limits the size of
the log files of a stack.

A line of JSON also contains ids, for example the id of the job that the line is about. To add an
id, pass it to the log call: `logger.info(…, extra={"job_id": job.id})`. The key must be one of
`IDS`.
"""

import contextlib
import json
import logging
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
NUM_KEPT = 3
"""How many older parts of a log are kept, in the same folder as the log. For example, `hub.log.1`
has the newest lines that are no longer in `hub.log`, and `hub.log.2` has older lines."""

IDS = ("pipeline", "job_id", "delivery_id", "delivery_ids", "release")
"""The keys of `extra` that are copied into a line of JSON."""

_QUIET = ("httpx", "httpcore", "huggingface_hub", "filelock")
"""Libraries that log too much at the level `info`, for example each request. Only their warnings
and errors are written, and at the level `error` only their errors."""


class LogSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    format: Literal["text", "json"] = "text"
    """The form of the log: `text` for people, or `json` for programs. `json` writes one object per
    line, with the ids of what the line is about, such as the job and the delivery."""
    level: Literal["debug", "info", "warning", "error"] = "info"
    """Log records below this level are not written."""


class JsonFormatter(logging.Formatter):
    """One JSON object per line: time, level, logger, service, message, ids, exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: getattr(record, name) for name in IDS if hasattr(record, name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def log_to_stderr(settings: LogSettings, service: str) -> None:
    """Set up logging for this process. Each service calls this once, when it starts."""
    handler = logging.StreamHandler(sys.stderr)
    if settings.format == "json":
        handler.setFormatter(JsonFormatter(service))
    else:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=settings.level.upper(), handlers=[handler], force=True)
    for name in _QUIET:
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLogger().level))


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
