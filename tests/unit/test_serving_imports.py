"""What must stay light stays light."""

import subprocess
import sys

import pytest

LIGHT = [
    "serving.swap_schemas",
    "serving.weights.release",
    "serving.weights.release_store",
    "serving.weights.publish",
    "serving.weights.verify",
    "serving.app",
]


@pytest.mark.parametrize("module", LIGHT)
def test_no_heavy_import(module: str) -> None:
    code = (
        f"import sys, {module}\n"
        "heavy = {'torch', 'transformers', 'datasets', 'safetensors'} & sys.modules.keys()\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
