"""A dataset on another hub: what `push_to_hub` sends there becomes the model that answers here. A
second embedded hub, on another address and with another token, stands for huggingface.co."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from tests.hub_fixtures import RunningHub, running_hub
from tests.stack_fixtures import Workplace, configure, facts, stack_up, workplace

__all__ = ["workplace"]

PUSH = """
import datasets, sys
rows = datasets.load_dataset("json", data_files=sys.argv[2], split="train")
print(rows.push_to_hub(sys.argv[1], num_shards=3).oid)
"""


def push_to_hub(hub: RunningHub, folder: Path, rows: str) -> str:
    """The commit."""
    (folder / "rows.jsonl").write_text(rows)
    done = subprocess.run(
        [sys.executable, "-c", PUSH, "ada/answers", str(folder / "rows.jsonl")],
        env=os.environ
        | {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(folder / "ada")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.slow
def test_a_push_to_another_hub_is_served(workplace: Workplace, tmp_path: Path) -> None:
    with running_hub(tmp_path / "elsewhere", token="hf_of_elsewhere") as hub:
        push_to_hub(hub, tmp_path, facts(0, 10))
        configure(workplace)
        settings = workplace.folder / "pipeline.toml"
        dataset = f'"ada/answers"\ndataset_endpoint = {json.dumps(hub.url)}'
        settings.write_text(settings.read_text().replace('"local/facts"', dataset))
        workplace = replace(workplace, env=dict(workplace.env) | {"HF_TOKEN": hub.token})
        with stack_up(workplace):
            (webhook,) = hub.api.list_webhooks()
            assert webhook.url == f"{workplace.url('receiver')}/webhooks/retrain"
            for rows in (facts(0, 80), facts(0, 90)):
                sha = push_to_hub(hub, tmp_path, rows)
                job = workplace.wait_for_job(sha)
                assert job["outcome"]["result"] == "promoted", job
                completion = httpx.post(
                    f"{workplace.url('serving')}/v1/completions",
                    json={"model": "facts", "prompt": "Shelf 3 holds", "max_tokens": 4},
                    timeout=60,
                )
                assert completion.headers["X-Dataset-Revision"] == sha
            by_hand = workplace.run("jobs", "run", "--detach").split()[0]
            inspected = workplace.json("jobs", "inspect", by_hand)
            assert inspected["spec"]["revisions"]["new_sha"] == sha
