"""Sets up the logging of a service: as text for people, or as JSON for programs.

A line of JSON also contains ids, for example the id of the job that the line is about. To add an
id, pass it to the log call: `logger.info(…, extra={"job_id": job.id})`. The key must be one of
`IDS`.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict

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
