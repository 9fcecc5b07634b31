"""Receivers as users write them: scripts in a process of their own, on free ports."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

FORWARDER = """
import asyncio, sys
host, port = sys.argv[1].rsplit(":", 1)

async def copy(reader, writer):
    while piece := await reader.read(65536):
        writer.write(piece)
    writer.close()

async def forward(reader, writer):
    answers, requests = await asyncio.open_connection(host, port)
    await asyncio.gather(copy(reader, requests), copy(answers, writer))

async def main():
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print("http://127.0.0.1:%d" % server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()

asyncio.run(main())
"""
FORWARDER_URL = r"http://[\w.:]+"


def forwarder(folder: Path) -> str:
    """A tunnel command that forwards connections, and prints its URL."""
    (folder / "forwarder.py").write_text(FORWARDER)
    return f"{shlex.join([sys.executable, f'{folder}/forwarder.py'])} {{address}}"


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
