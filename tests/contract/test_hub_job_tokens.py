"""What a running job may do on the hub with the token of its attempt."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi

from jobs.job import Job, attempt_token
from jobs.spec import JobSpec
from jobs.store import JobStore
from tests.hub_fixtures import SECRET_KEY, RunningHub, running_hub

pytest_plugins = ["tests.hub_plugin"]


@pytest.fixture
def hub(tmp_path: Path, store: JobStore) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "hub", jobs_store=store) as hub:
        hub.create_dataset("local/facts")
        yield hub


def started(store: JobStore) -> Job:
    store.submit(JobSpec(command=("true",), pipeline="facts"))
    job = store.claim("runner", lease_seconds=60)
    assert job is not None
    return job


def test_a_job_reads_and_writes_repositories_until_its_attempt_ends(
    hub: RunningHub, store: JobStore, tmp_path: Path
) -> None:
    job = started(store)
    token = attempt_token(job, SECRET_KEY)
    api = HfApi(endpoint=hub.url, token=token)
    assert api.dataset_info("local/facts").id == "local/facts"
    assert api.whoami()["name"] == "local"
    api.create_repo("local/report", repo_type="dataset")
    remote = f"{hub.url.replace('//', f'//job:{token}@')}/datasets/local/report"
    hub.git("clone", "-q", remote, str(tmp_path / "report"), cwd=tmp_path)

    store.finish(job.id, "runner", None)
    answer = httpx.get(
        f"{hub.url}/api/datasets/local/facts", headers={"Authorization": f"Bearer {token}"}
    )
    assert answer.status_code == 401
    assert "has ended" in answer.headers["x-error-message"]


def test_commits_and_tags_of_a_job_have_the_job_as_their_author(
    hub: RunningHub, store: JobStore, tmp_path: Path
) -> None:
    job = started(store)
    api = HfApi(endpoint=hub.url, token=attempt_token(job, SECRET_KEY))
    made = api.upload_file(
        path_or_fileobj=b"{}",
        path_in_repo="report.json",
        repo_id="local/facts",
        repo_type="dataset",
    )
    api.create_tag("local/facts", tag="checked", tag_message="Checked", repo_type="dataset")
    hub.git("clone", "-q", f"{hub.url}/datasets/local/facts", "facts", cwd=tmp_path)
    author = f"job {job.id} <{job.id}@jobs.hotpush.invalid>"
    for form, name in (
        ("%(authorname) %(authoremail)", "refs/remotes/origin/main"),
        ("%(committername) %(committeremail)", "refs/remotes/origin/main"),
        ("%(taggername) %(taggeremail)", "refs/tags/checked"),
    ):
        shown = hub.git("for-each-ref", f"--format={form}", name, cwd=tmp_path / "facts")
        assert shown == author, form
    assert hub.git("rev-parse", "checked^{commit}", cwd=tmp_path / "facts") == made.oid


def test_a_job_sends_and_fetches_large_files_until_its_attempt_ends(
    hub: RunningHub, store: JobStore
) -> None:
    job = started(store)
    headers = {"Authorization": f"Bearer {attempt_token(job, SECRET_KEY)}"}
    batch = f"{hub.url}/datasets/local/facts.git/info/lfs/objects/batch"
    xet = f"{hub.url}/api/datasets/local/facts/xet-write-token/main"
    wanted = {"operation": "upload", "objects": [{"oid": "0" * 64, "size": 1}]}
    assert httpx.post(batch, json=wanted, headers=headers).is_success
    assert httpx.get(xet, headers=headers).is_success
    store.finish(job.id, "runner", None)
    refused = httpx.post(batch, json=wanted, headers=headers)
    assert (refused.status_code, "has ended" in refused.json()["message"]) == (403, True)
    assert httpx.get(xet, headers=headers).status_code == 401


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/api/settings/webhooks"),
        ("POST", "/api/settings/webhooks"),
        ("GET", "/api/settings/deliveries"),
        ("DELETE", "/api/repos/delete"),
        ("POST", "/api/repos/move"),
    ],
)
def test_a_job_changes_nothing_else(
    hub: RunningHub, store: JobStore, method: str, path: str
) -> None:
    headers = {"Authorization": f"Bearer {attempt_token(started(store), SECRET_KEY)}"}
    answer = httpx.request(method, f"{hub.url}{path}", headers=headers)
    assert answer.status_code == 403
    assert "j000001" in answer.headers["x-error-message"]
