import subprocess
import sys

import pytest

CODE = """
import logging, sys
from pipeline.logs import LogSettings, log_to_stderr

log_to_stderr(LogSettings(level=sys.argv[1]), "hub")
for logger in ("pipeline", "httpx"):
    for level in ("info", "warning", "error"):
        getattr(logging.getLogger(logger), level)("x")
"""


@pytest.mark.parametrize(
    ("level", "written"),
    [
        ("info", ["INFO pipeline", "WARNING pipeline", "ERROR pipeline"]),
        ("error", ["ERROR pipeline"]),
    ],
)
def test_no_record_below_the_level_is_written(level: str, written: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE, level], capture_output=True, text=True, check=True
    )
    lines = [line.split(maxsplit=2)[2].removesuffix(": x") for line in done.stderr.splitlines()]
    quiet = ["ERROR httpx"] if level == "error" else ["WARNING httpx", "ERROR httpx"]
    assert lines == [*written, *quiet]
