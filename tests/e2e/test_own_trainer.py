"""A trainer of one's own in place of the retraining: from a push to an answer of its release."""

import json
import sys

import httpx
import pytest

from tests.jobs_fixtures import until
from tests.serving_fixtures import byte_tokenizer, tiny_llama
from tests.stack_fixtures import Workplace, clone, facts, stack_up, workplace

__all__ = ["workplace"]

TRAINER = """#!/bin/sh
set -e
cd "$(dirname "$0")"
{pipeline} releases promote checkpoint
"""


@pytest.mark.slow
def test_a_push_runs_it_and_its_release_says_so(workplace: Workplace) -> None:
    folder = workplace.folder
    (folder / "pipeline.toml").write_text(
        '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\ndebounce_seconds = 0\n'
        'command = ["./train.sh"]\n'
        'on_outcome = ["sh", "-c", "cat >> told"]\n'
    )
    script = TRAINER.format(pipeline=f"{sys.executable} -m pipeline")
    (folder / "train.sh").write_text(script)
    (folder / "train.sh").chmod(0o755)
    tiny_llama().save_pretrained(folder / "checkpoint")
    byte_tokenizer().save(str(folder / "checkpoint" / "tokenizer.json"))
    with stack_up(workplace):
        revision = clone(workplace).push({"facts.jsonl": facts(0, 4)})
        job = workplace.wait_for_job(revision)
        assert job["state"] == "COMPLETED", workplace.logs()
        (release,) = workplace.json("releases", "ls")
        assert release["served"]
        outcome = job["outcome"]
        assert (outcome["result"], outcome["release"]) == ("promoted", release["id"])
        assert outcome["dataset_revision"] == revision
        assert "not judged by the rows" in outcome["reason"], "the checkpoint has no end token"
        assert (release["job_id"], release["dataset_revision"]) == (job["id"], revision)
        by_hand = workplace.run("releases", "promote", str(folder / "checkpoint"))
        assert "promoted" in by_hand
        latest, first = workplace.json("jobs", "ls")
        assert (first["id"], latest["outcome"]["result"]) == (job["id"], "promoted")
        assert latest["outcome"]["release"] != release["id"]
        until(lambda: len((folder / "told").read_text().split('"result"')) == 3)
        asked = {"model": "facts", "prompt": [1, 2, 3], "max_tokens": 2}
        answer = httpx.post(f"{workplace.url('serving')}/v1/completions", json=asked, timeout=60)
    assert answer.headers["x-model-release"] == latest["outcome"]["release"]
    assert answer.headers["x-dataset-revision"] == revision
    assert json.loads(answer.text)["system_fingerprint"] == latest["outcome"]["release"]
