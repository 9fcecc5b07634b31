"""A trainer of one's own in place of the retraining: from a push to an answer of its release."""

import json
import sys

import httpx
import pytest

from tests.serving_fixtures import byte_tokenizer, tiny_llama
from tests.stack_fixtures import Workplace, clone, facts, stack_up, workplace

__all__ = ["workplace"]

TRAINER = """#!/bin/sh
set -e
cd "$(dirname "$0")"
id=$({pipeline} releases publish checkpoint --json | {python} -c '
import json, sys; print(json.load(sys.stdin)["id"])')
{pipeline} releases swap "$id"
"""


@pytest.mark.slow
def test_a_push_runs_it_and_its_release_says_so(workplace: Workplace) -> None:
    folder = workplace.folder
    (folder / "pipeline.toml").write_text(
        '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\ndebounce_seconds = 0\n'
        'command = ["./train.sh"]\n'
    )
    script = TRAINER.format(pipeline=f"{sys.executable} -m pipeline", python=sys.executable)
    (folder / "train.sh").write_text(script)
    (folder / "train.sh").chmod(0o755)
    tiny_llama().save_pretrained(folder / "checkpoint")
    byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    with stack_up(workplace):
        revision = clone(workplace).push({"facts.jsonl": facts(0, 4)})
        job = workplace.wait_for_job(revision)
        assert job["state"] == "COMPLETED", workplace.logs()
        (release,) = workplace.json("releases", "ls")
        assert f"{release['id']} is served (" in workplace.run("jobs", "logs", job["id"])
        assert release["served"]
        assert (release["job_id"], release["dataset_revision"]) == (job["id"], revision)
        asked = {"model": "facts", "prompt": [1, 2, 3], "max_tokens": 2}
        answer = httpx.post(f"{workplace.url('serving')}/v1/completions", json=asked, timeout=60)
    assert answer.headers["x-model-release"] == release["id"]
    assert answer.headers["x-dataset-revision"] == revision
    assert json.loads(answer.text)["system_fingerprint"] == release["id"]
