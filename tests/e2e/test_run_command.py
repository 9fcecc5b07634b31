"""`pipeline jobs run -- CMD` as a shell runs it: in a folder without settings."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jobs.spec import JobSpec
from pipeline.cli.main import app
from pipeline.errors import PipelineError

ROOT = Path(__file__).parents[2]

SCRIPT = """#!/bin/sh
echo "about $WEBHOOK_REPO_ID in $JOB_ID: $COLOR ${#API_KEY}"
cat "$WEBHOOK_PAYLOAD_FILE"
exit $1
"""


def test_it_shows_the_output_and_passes_the_exit_code_on(tmp_path: Path) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    (tmp_path / "train.sh").chmod(0o755)
    (tmp_path / "push.json").write_text('{"repo": {"name": "me/facts"}, "n": 41}')
    environ = {name: value for name, value in os.environ.items() if "PIPELINE" not in name}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    run = ("run", "--payload", "push.json", "--env", "COLOR=red", "--secret", "API_KEY")
    for id, command in (
        ("j000001", (*run, "--label", "a=b", "--timeout", "5m", "--", "./train.sh", "7")),
        ("j000002", ("retry", "j000001")),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "pipeline", "jobs", *command],
            cwd=tmp_path,
            # A fork server that imports torch first would take most of the time.
            env={
                **environ,
                "PYTHONPATH": path,
                "API_KEY": "s3cret",
                "PIPELINE_JOBS__PRELOAD": "[]",
            },
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
        )
        assert done.returncode == 7, done.stderr
        told, payload = done.stdout.splitlines()
        assert told == f"about me/facts in {id}: red 6"
        assert '"n": 41' in payload
        assert "exited with 7" in done.stderr
        [spec] = tmp_path.glob(f"*/jobs/{id}/spec.json")
        assert JobSpec.model_validate_json(spec.read_text()).timeout_seconds == 300
        assert "s3cret" not in spec.read_text()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--mode", "full"), "work only for a retraining"),
        (("--force",), "work only for a retraining"),
        (("--reason", "why"), "must be used together"),
        (("--payload", "push.json", "--revision", "main"), "leave out one of them"),
    ],
)
def test_options_that_a_command_does_not_follow_are_refused(
    options: tuple[str, ...], reason: str
) -> None:
    done = CliRunner().invoke(app, ["jobs", "run", *options, "--", "true"])
    assert isinstance(done.exception, PipelineError) and reason in str(done.exception)
