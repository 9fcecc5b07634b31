"""docs/operations.md as it stands there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.jobs_fixtures import until
from tests.stack_fixtures import Workplace, clone, facts, workplace

__all__ = ["workplace"]

DOCS = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", DOCS, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
def test_the_blocks_run_as_they_stand(workplace: Workplace) -> None:
    train = (
        "[pipelines.train]\nmax_tokens = 2000\nmax_length = 64\n[pipelines.gate]\nmin_learned = 0\n"
    )
    (workplace.folder / "pipeline.toml").write_text("\n".join([*blocks("toml"), train]))
    commands = workplace.folder / "bin"
    commands.mkdir()
    (commands / "pipeline").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pipeline "$@"\n')
    (commands / "pipeline").chmod(0o755)
    ports = {8071: "JOBS__METRICS_PORT", 8070: "HUB__PORT", 8000: "SERVING__PORT"}
    script = "\n".join(["set -euo pipefail", *blocks("bash")])
    for port, name in ports.items():
        script = script.replace(f":{port}/", f":{workplace.env[f'PIPELINE_{name}']}/")

    assert "\nnotes: push to http://127.0.0.1:" in workplace.run("up", "--detach")
    try:
        checkout = clone(workplace, "notes")
        job = workplace.wait_for_job(checkout.push({"facts.jsonl": facts(0, 60)}))
        assert job["outcome"]["result"] == "promoted", job["outcome"]
        told = workplace.folder / "outcomes.jsonl"
        until(lambda: told.exists() and told.read_text().endswith("}"))
        env = {**workplace.env, "PATH": f"{commands}:{os.environ['PATH']}"}
        done = workplace.call(["bash", "-c", script], env=env)
    finally:
        workplace.run("down")
    outcome = json.loads(told.read_text())
    assert (outcome["pipeline"], outcome["result"]) == ("notes", "promoted")
    assert 'pipeline_commit_to_serving_seconds_count{pipeline="notes"} 1.0' in done
    assert "is kept until it is unpinned" in done
    assert (workplace.folder / "pipeline-backup" / "tokens.json").exists()

    # One push, from log to log.
    (delivery_id,) = job["outcome"]["delivery_ids"]
    (delivered,) = logged(workplace, "hub", delivery_id=delivery_id)
    assert "now delivered" in delivered["message"]
    assert logged(workplace, "receiver", delivery_id=delivery_id, job_id=job["id"])
    ran = logged(workplace, "runner", job_id=job["id"])
    assert ran[0]["delivery_ids"] == [delivery_id]
    assert logged(workplace, "serve", release=job["outcome"]["release"])


def test_the_unit_is_one_that_systemd_takes(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        pytest.skip("there is no systemd on this machine")
    (unit,) = blocks("ini")
    assert "\nExecStart=%h/hotpush/.venv/bin/pipeline up\n" in unit
    file = tmp_path / "notes.service"
    file.write_text(unit.replace("%h/hotpush/.venv/bin/pipeline", sys.executable))
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    done = subprocess.run(
        [analyze, "--user", "verify", str(file)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")


def logged(workplace: Workplace, service: str, **ids: str) -> list[dict[str, Any]]:
    """Lines of its logger about these; what a service says when it starts is for a person."""
    text = (workplace.home / "logs" / f"{service}.log").read_text()
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    return [line for line in lines if ids.items() <= line.items()]
