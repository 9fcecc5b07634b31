"""Runs the app of a Space on this machine, in the environment that a Space would give it."""

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType

from pipeline.errors import PipelineError
from pipeline.orphans import end_with_parent
from pipeline.space_files import APP, README, subdomain

HOST = "127.0.0.1"
KILL_AFTER_SECONDS = 15.0
"""An app that still runs so long after SIGTERM is killed. A receiver needs less time: it waits for
its running handlers for 10 s (`shutdown_seconds`)."""
_NOT_PASSED_TO_APP = ("HF_TOKEN", "HF_ENDPOINT", "WEBHOOK_SECRET", "HUGGING_FACE_HUB_TOKEN")
"""Variables of this process that the app does not get, because a Space does not have them. If the
settings of the Space set one of these names, the app gets the value from these settings."""


def app_file(folder: Path) -> Path:
    """The script that the Space runs. The key `app_file` in the front matter (the YAML at the start
    of the Space's README) names the script. Without this key, the script is `app.py`. Raises
    PipelineError."""
    import yaml
    from huggingface_hub import metadata_load

    readme = folder / README
    try:
        card = metadata_load(readme) if readme.is_file() else None
    except (ValueError, yaml.YAMLError) as error:
        raise PipelineError(f"the front matter of {readme} cannot be read: {error}") from None
    file = folder / str((card or {}).get("app_file", APP))
    if not file.resolve().is_relative_to(folder.resolve()) or not file.is_file():
        raise PipelineError(f"there is no {file.name} in {folder}; a Space runs that file")
    return file


def environment(
    space: str, port: int, settings: Mapping[str, str], shell: Mapping[str, str]
) -> dict[str, str]:
    """The environment variables that the app gets. `settings` has the Space's secrets and
    variables. `shell` has the environment variables of this process."""
    inherited = {
        name: value
        for name, value in shell.items()
        if name not in _NOT_PASSED_TO_APP and not name.startswith("PIPELINE_")
    }
    owner, _, name = space.partition("/")
    return inherited | {
        "SPACE_ID": space,
        "SPACE_AUTHOR_NAME": owner,
        "SPACE_REPO_NAME": name,
        "SPACE_HOST": f"{subdomain(space)}.hf.space",
        "SPACE_TITLE": name,
        "SYSTEM": "spaces",
        "PYTHONUNBUFFERED": "1",
        **settings,
        # In a Space, the app listens on every address. Here, other machines must not reach the app.
        "GRADIO_SERVER_NAME": HOST,
        "GRADIO_SERVER_PORT": str(port),
    }


def run_app(
    file: Path, variables: Mapping[str, str], port: int, on_ready: Callable[[], None]
) -> int:
    """Run the script until it ends, or until this process gets SIGINT or SIGTERM. On such a signal,
    the app gets SIGTERM, and must end within `KILL_AFTER_SECONDS`. Calls `on_ready` once, as soon
    as the app listens.

    Returns the exit code of the script, or 0 if this process got one of the two signals. Raises
    PipelineError if the port is in use.
    """
    if _listens(port):
        raise PipelineError(f"port {port} on {HOST} is in use; choose another one with --port")
    stopped_by: list[int] = []
    app: subprocess.Popen[bytes] | None = None

    def stop(number: int, _frame: FrameType | None) -> None:
        stopped_by.append(number)
        if app is not None:
            app.terminate()

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        app = subprocess.Popen(
            [sys.executable, str(file.resolve())],
            cwd=file.parent,
            env=dict(variables),
            # Give the app its own session. Otherwise Ctrl-C would reach it twice: from the terminal
            # and from `stop` above.
            start_new_session=True,
            preexec_fn=end_with_parent(os.getpid()) if sys.platform == "linux" else None,
        )
        if stopped_by:  # the signal came before `stop` knew the app
            app.terminate()
        is_ready, kill_at = False, math.inf
        while app.poll() is None and time.monotonic() < kill_at:
            if stopped_by and kill_at == math.inf:
                kill_at = time.monotonic() + KILL_AFTER_SECONDS
            if not is_ready and _listens(port):
                is_ready = True
                on_ready()
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if app is not None:
            app.kill()
            app.wait()
    return 0 if stopped_by else app.returncode


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex((HOST, port)) == 0
