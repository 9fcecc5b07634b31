"""A webhook with a job starts a copy of it through the real runner, with payload and secret."""

import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from jobs.job import Job
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, RevisionRange
from jobs.store import JobStore
from tests.hub_fixtures import SECRET_KEY, RunningHub, push_file, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "dataset", "name": "local/facts"}]
REPORT = """
import json, os
names = ("WEBHOOK_PAYLOAD", "WEBHOOK_REPO_ID", "WEBHOOK_ID", "WEBHOOK_SECRET", "API_KEY", "COLOR")
with open(os.path.join(os.environ["JOB_DIR"], "seen.json"), "w") as file:
    json.dump({name: os.environ.get(name) for name in names}, file)
"""


@pytest.fixture
def hub(tmp_path: Path, store: JobStore) -> Iterator[RunningHub]:
    with running_hub(
        tmp_path / "hub", jobs_store=store, delivery_schedule_seconds=(0, 0.01)
    ) as hub:
        yield hub


def source_of(store: JobStore, **spec: object) -> str:
    """A job to copy, which has ended; its id."""
    command = (sys.executable, "-c", REPORT)
    job = store.submit(JobSpec.model_validate({"command": command, **spec}))
    return store.cancel(job.id).id


def copies(store: JobStore, source: str) -> list[Job]:
    """Oldest first."""
    return [job for job in reversed(store.list()) if job.id != source]


def run(store: JobStore, jobs_dir: Path, job: Job, key: bytes | None = SECRET_KEY) -> Path:
    settings = JobsSettings(preload=())
    environment = {"PATH": "/usr/bin:/bin", "WEBHOOK_SECRET": "the-receiver's"}
    Runner(store, jobs_dir, settings, environment, secret_key=key).run(
        threading.Event(), until_idle=True
    )
    return jobs_dir / job.id


def test_a_push_starts_a_copy_with_the_payload_and_the_secret(
    hub: RunningHub, store: JobStore, worktree: Path, tmp_path: Path
) -> None:
    source = source_of(store, env={"COLOR": "red", "API_KEY": "none"})
    webhook = hub.api.create_webhook(job_id=source, watched=WATCHED, secret="s3cret")
    assert webhook.url is None and webhook.job is not None
    sha = push_file(hub, worktree, "a.txt", "1")
    [job] = wait_until(lambda: copies(store, source))
    [delivery] = wait_until(
        lambda: [one for one in hub.deliveries(webhook.id) if one["status"] == "delivered"]
    )
    assert json.loads(delivery["response_head"]) == {"job": job.id}

    job_dir = run(store, tmp_path / "jobs", job)
    seen = json.loads((job_dir / "seen.json").read_text())
    payload = json.loads(seen.pop("WEBHOOK_PAYLOAD"))
    assert payload["updatedRefs"] == [{"ref": "refs/heads/main", "oldSha": None, "newSha": sha}]
    assert seen == {
        "WEBHOOK_REPO_ID": "local/facts",
        "WEBHOOK_ID": webhook.id,
        "WEBHOOK_SECRET": "s3cret",
        "API_KEY": "none",
        "COLOR": "red",
    }
    # In clear the secret stands nowhere: not in the folder of the job, nor in either database.
    for file in (*tmp_path.glob("jobs.sqlite*"), *hub.root.glob("hub.sqlite*"), *job_dir.iterdir()):
        if file.name != "seen.json":
            assert b"s3cret" not in file.read_bytes(), file


def test_a_replay_starts_nothing_and_a_forced_one_another_copy(
    hub: RunningHub, store: JobStore, worktree: Path
) -> None:
    source = source_of(store)
    id = hub.api.create_webhook(job_id=source, watched=WATCHED).id
    push_file(hub, worktree, "a.txt", "1")
    [first] = wait_until(lambda: [d for d in hub.deliveries(id) if d["status"] == "delivered"])
    path = f"/api/settings/deliveries/{first['id']}/replay"
    hub.request("POST", path).raise_for_status()
    wait_until(lambda: hub.deliveries(id)[0]["last_attempt_at"] > first["last_attempt_at"])
    assert len(copies(store, source)) == 1
    hub.request("POST", f"{path}?force=1").raise_for_status()
    wait_until(lambda: len(copies(store, source)) == 2)


def test_a_copy_of_a_retraining_answers_for_the_pushed_commits(
    hub: RunningHub, store: JobStore, worktree: Path
) -> None:
    ref = "refs/heads/main"
    known = RevisionRange(repo="local/facts", ref=ref, new_sha="a" * 40)
    source = source_of(store, pipeline="facts", revisions=known)
    id = hub.api.create_webhook(job_id=source, watched=WATCHED).id
    first, second = push_file(hub, worktree, "a.txt", "1"), push_file(hub, worktree, "a.txt", "2")
    wait_until(lambda: [d["status"] for d in hub.deliveries(id)] == ["delivered"] * 2)
    [job] = copies(store, source)  # the pipeline's one pending job took both
    assert job.spec.revisions is not None
    assert job.spec.revisions.new_sha is None, "it gets the head when it starts"
    assert len(job.spec.revisions.delivery_ids) == 2
    assert [job.id] == [each.id for sha in (first, second) for each in store.of_commit(sha)][:1]


@pytest.mark.parametrize("key", [None, b"A" * 43 + b"="])
def test_a_runner_without_the_key_starts_no_job_that_has_a_secret(
    hub: RunningHub, store: JobStore, worktree: Path, tmp_path: Path, key: bytes | None
) -> None:
    source = source_of(store)
    hub.api.create_webhook(job_id=source, watched=WATCHED, secret="s3cret")
    push_file(hub, worktree, "a.txt", "1")
    [job] = wait_until(lambda: copies(store, source))
    run(store, tmp_path / "jobs", job, key)
    job = store.get(job.id)
    assert job.state == "ERROR"
    assert job.outcome is not None and "key" in str(job.outcome.reason)


def test_a_webhook_goes_from_a_job_to_a_url_and_back(hub: RunningHub, store: JobStore) -> None:
    source = source_of(store)
    id = hub.api.create_webhook(job_id=source, watched=WATCHED).id
    moved = hub.api.update_webhook(id, url="http://127.0.0.1:9/")
    assert (moved.url, moved.job) == ("http://127.0.0.1:9/", None)
    back = hub.api.update_webhook(id, job_id=source)
    assert back.url is None and back.job is not None


def test_a_test_delivery_starts_nothing(hub: RunningHub, store: JobStore, worktree: Path) -> None:
    source = source_of(store)
    created = hub.api.create_webhook(job_id=source, watched=WATCHED)
    hub.request("POST", f"/api/settings/webhooks/{created.id}/test")
    [delivery] = wait_until(
        lambda: [one for one in hub.deliveries(created.id) if one["status"] == "delivered"]
    )
    assert delivery["response_head"] == '{"pong": true}'
    assert copies(store, source) == []


def test_only_the_hubs_own_token_makes_a_webhook_that_starts_a_command(
    hub: RunningHub, store: JobStore
) -> None:
    made = hub.request("POST", "/api/settings/tokens/ada?role=write").json()
    writer = HfApi(endpoint=hub.url, token=made["token"])
    with pytest.raises(HfHubHTTPError, match="needs the hub's own token"):
        writer.create_webhook(job_id=source_of(store), watched=WATCHED)
    writer.create_webhook(job_id=source_of(store, pipeline="facts"), watched=WATCHED)
