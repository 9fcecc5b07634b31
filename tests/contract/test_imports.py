"""What may import what, and what stays light."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "safetensors", "vllm", "gradio")
WEB = ("sqlalchemy", "fastapi", "huggingface_hub")


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import jobs.store, receiver.server, receiver.retrain", HEAVY),
        ("import jobs.runner", (*HEAVY, "fastapi")),
        ("import pipeline.hub.app, pipeline.console.app", HEAVY),
        ("import serving.app, serving.weights.publish, serving.weights.verify", HEAVY),
        ("import pipeline.settings, pipeline.stack.supervisor", HEAVY),
        # The story of a job is told without torch.
        ("import pipeline.retrain.run, pipeline.cli.demo, pipeline.cli.progress", HEAVY),
        (
            "import sys; sys.argv = ['pipeline', '--help']\n"
            "from pipeline.cli.main import main\n"
            "try: main()\n"
            "except SystemExit as end: assert not end.code",
            HEAVY + WEB,
        ),
    ],
)
def test_light_modules_load_nothing_heavy(statement: str, heavy: tuple[str, ...]) -> None:
    code = f"{statement}\nimport sys\nprint([name for name in {heavy!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
