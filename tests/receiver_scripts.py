"""Receivers as users write them: scripts in a process of their own, on free ports."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def running(
    folder: Path, code: str, *, python: str = sys.executable, **environment: str
) -> Iterator[tuple[str, list[str], subprocess.Popen[str]]]:
    """The script's base URL, what it printed so far, and its process."""
    script = folder / "app.py"
    script.write_text(code)
    with subprocess.Popen(
        [python, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"} | environment,
    ) as process:
        assert process.stdout is not None
        printed: list[str] = []
        try:
            for line in process.stdout:
                printed.append(line.rstrip())
                if line.startswith("Open "):
                    break
            urls = re.findall(r"http://[\w.:]+", "\n".join(printed))
            assert urls, f"exit {process.poll()}: {printed}"
            yield urls[0], printed, process
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(30)


def on_port(code: str, port: int) -> str:
    """The script with a port of its own: several tests may run on one machine."""
    return f"import os\nos.environ['GRADIO_SERVER_PORT'] = '{port}'\n" + code
