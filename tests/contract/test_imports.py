"""What may import what, and what stays light."""

import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("torch", "transformers", "datasets", "safetensors", "vllm", "gradio")


def test_the_floors_hold() -> None:
    # In a process of its own: it silences every logger that exists.
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "statement",
    [
        "import jobs, receiver",
        "import jobs.runner, jobs.store, receiver.server, receiver.retrain",
        "import pipeline.hub.app",
        "import serving.weights.release, serving.weights.release_store, serving.swap_schemas",
        "import pipeline.settings, pipeline.stack.supervisor",
        "import sys; sys.argv = ['pipeline', '--help']; import pipeline.cli.main",
    ],
)
def test_light_packages_load_nothing_heavy(statement: str) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_loads_no_database_and_no_web_framework() -> None:
    code = (
        "import sys; sys.argv = ['pipeline', '--help']\n"
        "from pipeline.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = ('sqlalchemy', 'fastapi', 'huggingface_hub')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Usage" in done.stdout
    assert done.stdout.strip().endswith("[]")
