"""What a retraining may load, and when."""

import subprocess
import sys


def test_the_story_of_a_job_is_told_without_torch() -> None:
    code = (
        "import sys, pipeline.retrain.run, pipeline.cli.demo, pipeline.cli.progress\n"
        "loaded = {'torch', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
