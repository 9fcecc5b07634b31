"""Which commit a release names if a command that an event started publishes it."""

import json
from pathlib import Path

from jobs.spec import JobSpec
from pipeline.runner.submit import lineage_of_job
from tests.receiver_payloads import dataset_update, ref_update


def test_a_push_of_two_refs_gives_the_commit_of_the_followed_one(tmp_path: Path) -> None:
    pushed = (ref_update("refs/heads/side", new="a" * 40), ref_update(new="b" * 40))
    payload = tmp_path / "payload.json"
    payload.write_text(json.dumps(dataset_update(*pushed)))
    (tmp_path / "spec.json").write_text(JobSpec(command=("true",)).model_dump_json())
    environment = {
        "JOB_ID": "j1",
        "JOB_DIR": str(tmp_path),
        "WEBHOOK_PAYLOAD_FILE": str(payload),
    }
    for followed, expected in (
        ("refs/heads/main", ("refs/heads/main", "b" * 40)),
        ("refs/heads/side", ("refs/heads/side", "a" * 40)),
        ("refs/heads/none", ("refs/heads/side", "a" * 40)),
    ):
        found = lineage_of_job(environment, followed)
        assert (found.dataset_ref, found.dataset_revision) == expected
