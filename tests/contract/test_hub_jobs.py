"""The unmodified client of the Hugging Face Hub, and its command `hf jobs`, run jobs on this hub: a
real hub, with a real runner."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pytest
from huggingface_hub import HfApi, Volume
from huggingface_hub.errors import HfHubHTTPError, JobNotFoundError

from jobs.job import attempt_token, unseal
from jobs.launcher import Launcher, LauncherSettings
from jobs.runner import Runner
from jobs.settings import JobsSettings
from jobs.spec import JobSpec, Resources
from jobs.store import JobStore
from pipeline.hub.database import open_database
from pipeline.hub.errors import BadRequest
from pipeline.hub.schedules import LABEL, next_run, start_due
from tests.hub_fixtures import SECRET_KEY, RunningHub, push_file, running_hub, wait_until

pytest_plugins = ["tests.hub_plugin"]

IMAGE = "python:3.12"
PATIENT = "echo one; while [ ! -e {go} ]; do sleep 0.05; done; printf 'two\\rthree'"
"""Ends when the file `go` is there."""


@pytest.fixture
def hub(tmp_path: Path, store: JobStore) -> Iterator[RunningHub]:
    with running_hub(tmp_path / "hub", jobs_store=store) as hub:
        yield hub


@pytest.fixture
def runner(tmp_path: Path, store: JobStore) -> Iterator[None]:
    settings = JobsSettings(preload=(), max_running=4, heartbeat_seconds=0.2, kill_grace_seconds=1)
    environment = {"PATH": os.environ["PATH"]}
    runner = Runner(store, tmp_path / "jobs", settings, environment, secret_key=SECRET_KEY)
    stop = threading.Event()
    thread = threading.Thread(target=runner.run, args=(stop,))
    thread.start()
    yield
    for job in store.list(state=("SCHEDULING", "RUNNING")):
        store.cancel(job.id)
    stop.set()
    thread.join()


@pytest.fixture
def environment(hub: RunningHub, tmp_path: Path) -> dict[str, str]:
    """Of `hf`."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_TOKEN": hub.token,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "API_KEY": "s3cret",
    }


@pytest.fixture
def hf(environment: dict[str, str]) -> Callable[..., subprocess.CompletedProcess[str]]:
    def hf(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["hf", "jobs", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)

    return hf


Hf = Callable[..., subprocess.CompletedProcess[str]]


def test_the_command_runs_a_job_and_shows_its_secret_nowhere(
    hf: Hf, hub: RunningHub, store: JobStore, runner: None, tmp_path: Path
) -> None:
    script = 'echo "$COLOR ${#API_KEY}"'
    options = ("-e", "COLOR=red", "--secrets", "API_KEY", "--label", "team=a", "--timeout", "5m")
    done = hf("run", *options, "--name", "first", IMAGE, "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    assert "red 6" in done.stdout.splitlines() and "Job j000001 completed" in done.stdout
    assert "the flavor is ignored, and the image too unless" in done.stderr
    job = store.get("j000001")
    assert (job.spec.timeout_seconds, job.by_hand) == (300, True)
    assert unseal(job.spec.sealed_env, SECRET_KEY) == {"API_KEY": "s3cret"}

    [listed] = json.loads(hf("ps", "-a", "--label", "team=a", "--json").stdout)
    assert (listed["status"], listed["image/space"]) == ("COMPLETED", IMAGE)
    assert json.loads(hf("ps", "-a", "--label", "team=b", "--json").stdout) == []
    [shown] = json.loads(hf("inspect", "local/j000001", "--json").stdout)
    assert (shown["secrets"], shown["environment"]) == ({"API_KEY": "***"}, {"COLOR": "red"})
    for file in (*tmp_path.glob("jobs.sqlite*"), *(tmp_path / "jobs" / job.id).iterdir()):
        assert b"s3cret" not in file.read_bytes(), file


def test_the_launcher_huggingface_uses_the_command(
    environment: dict[str, str], store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    preset = {"preset": "huggingface", "agent": ("python3", "-m", "jobs.agent")}
    launcher, name = Launcher(LauncherSettings.model_validate(preset)), "hotpush-j000001-1"
    given = {"JOB_URL": "http://hub:8070/api/jobs/j1/attempts/1", "JOB_TICKET": "t1cket"}
    for _ in range(2):  # the second time, it is there already
        launcher.submit(name, given, Resources(image=IMAGE, queue="t4-small", timeout_seconds=90))
    [job] = store.list()
    assert (job.spec.command, job.spec.timeout_seconds) == (launcher.settings.agent, 90)
    assert job.spec.env == {"JOB_URL": given["JOB_URL"]}
    assert unseal(job.spec.sealed_env, SECRET_KEY) == {"JOB_TICKET": given["JOB_TICKET"]}
    assert launcher.status(name).state == "queued"
    launcher.cancel(name)
    assert store.get(job.id).state == "CANCELED"
    assert launcher.status(name).state == "ended"


def test_a_failure_has_its_reason_and_the_command_fails(hf: Hf, runner: None) -> None:
    done = hf("run", IMAGE, "sh", "-c", "echo bad; exit 3")
    assert done.returncode == 1 and "bad" in done.stdout.splitlines()
    assert "finished with stage 'ERROR'" in done.stderr and "3" in done.stderr


def test_a_log_is_followed_while_the_job_writes_it(
    hub: RunningHub, store: JobStore, runner: None, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    job = hub.api.run_job(image=IMAGE, command=["sh", "-c", PATIENT.format(go=go)])
    lines = iter(hub.api.fetch_job_logs(job_id=job.id, follow=True))
    assert next(lines) == "one"
    assert hub.api.inspect_job(job_id=job.id).status.stage == "RUNNING"
    go.touch()
    assert list(lines) == ["two", "three"]
    assert store.get(job.id).state == "COMPLETED"
    assert list(hub.api.fetch_job_logs(job_id=job.id, tail=1)) == ["two", "three"]


def test_a_log_that_grows_all_the_time_ends_for_a_client_that_does_not_follow(
    hub: RunningHub, runner: None
) -> None:
    script = "while true; do echo more; sleep 0.2; done"
    job = hub.api.run_job(image=IMAGE, command=["sh", "-c", script])
    next(iter(hub.api.fetch_job_logs(job_id=job.id, follow=True)))
    assert set(hub.api.fetch_job_logs(job_id=job.id)) == {"more"}
    hub.api.cancel_job(job_id=job.id)
    assert hub.api.wait_for_job(job.id, poll_interval=0.1).status.stage == "CANCELED"


def test_with_a_launcher_a_job_runs_in_its_image(tmp_path: Path, store: JobStore) -> None:
    with running_hub(tmp_path / "hub", jobs_store=store, jobs_launcher="podman") as hub:
        spec = store.get(hub.api.run_job(image=IMAGE, command=["true"]).id).spec
    assert (spec.launcher, spec.resources.image) == ("podman", IMAGE)


def test_a_hub_that_stops_ends_the_stream_of_a_log(tmp_path: Path, store: JobStore) -> None:
    store.submit(JobSpec(command=("true",)))
    with httpx.Client() as client:
        with running_hub(tmp_path / "hub", jobs_store=store) as hub:
            headers = {"Authorization": f"Bearer {hub.token}"}
            url = f"{hub.url}/api/jobs/local/j000001/logs"
            response = client.send(client.build_request("GET", url, headers=headers), stream=True)
        assert response.read() == b"", "whole: it was not broken off"


def test_a_list_has_pages(hub: RunningHub, store: JobStore) -> None:
    ids = [store.submit(JobSpec(command=("true",))).id for _ in range(450)]
    store.cancel(ids[0])
    assert [job.id for job in hub.api.list_jobs(namespace="me")] == ids[::-1]
    open_jobs = hub.api.list_jobs(namespace="me", status=["running", "scheduling"])
    assert [job.id for job in open_jobs] == ids[:0:-1]
    assert list(hub.api.list_jobs(namespace="me", status="DELETED")) == []


def test_what_this_hub_cannot_do_is_refused(hub: RunningHub, store: JobStore) -> None:
    volume = Volume(type="dataset", source="local/facts", mount_path="/data")
    for wrong in ({"volumes": [volume]}, {"expose": [8000]}, {"ssh": True}, {"attempts": 2}):
        with pytest.raises(HfHubHTTPError, match="not supported by this hub") as refused:
            hub.api.run_job(image=IMAGE, command=["true"], **wrong)
        assert refused.value.response.status_code == 501
    with pytest.raises(HfHubHTTPError, match="needs a command"):
        hub.api.run_job(image=IMAGE, command=[])
    with pytest.raises(JobNotFoundError):
        hub.api.inspect_job(job_id="j000009")
    assert store.list() == []


def test_a_reader_only_looks_and_a_job_not_even_that(hub: RunningHub, store: JobStore) -> None:
    made = hub.request("POST", "/api/settings/tokens/ada?role=read").json()
    reader = HfApi(endpoint=hub.url, token=made["token"])
    hub.api.run_job(image=IMAGE, command=["true"])
    assert reader.inspect_job(job_id="j000001").status.stage == "SCHEDULING"
    with pytest.raises(HfHubHTTPError, match="may only read"):
        reader.cancel_job(job_id="j000001")
    job = store.claim("me", lease_seconds=60)
    assert job is not None
    headers = {"Authorization": f"Bearer {attempt_token(job, SECRET_KEY)}"}
    body = {"command": ["true"]}
    assert httpx.post(f"{hub.url}/api/jobs/local", json=body, headers=headers).status_code == 403


def test_a_webhook_starts_copies_of_such_a_job(
    hub: RunningHub, store: JobStore, worktree: Path, runner: None
) -> None:
    command = ["sh", "-c", "echo $WEBHOOK_REPO_ID"]
    job = hub.api.run_job(image=IMAGE, command=command, secrets={"API_KEY": "s3cret"})
    hub.api.create_webhook(job_id=job.id, watched=[{"type": "user", "name": "local"}])
    push_file(hub, worktree, "a.txt", "1")
    wait_until(lambda: len(store.list()) == 2)
    assert list(hub.api.fetch_job_logs(job_id="j000002", follow=True)) == ["local/facts"]
    assert hub.api.inspect_job(job_id="j000002").secrets == {}, "as on the Hugging Face Hub"


def test_a_scheduled_job_runs_until_it_is_deleted(
    hf: Hf, hub: RunningHub, store: JobStore, runner: None
) -> None:
    each_second = "* * * * * *"
    made = hf("scheduled", "run", each_second, "--secrets", "API_KEY", "--quiet", IMAGE, "true")
    id = made.stdout.strip()
    wait_until(lambda: len(store.list(state="COMPLETED")) >= 2)
    [shown] = json.loads(hf("scheduled", "ps", "--json").stdout)
    assert (shown["id"], shown["suspend"]) == (id, False)
    [listed] = hub.api.list_scheduled_jobs()
    assert listed.job_spec.secrets == {"API_KEY": "***"}
    assert hf("scheduled", "delete", id).returncode == 0
    assert hub.api.list_scheduled_jobs() == []
    assert all(job.spec.labels[LABEL] == id for job in store.list())


def test_missed_runs_run_once_and_a_run_waits_for_no_other(
    hub: RunningHub, store: JobStore, caplog: pytest.LogCaptureFixture
) -> None:
    made = hub.api.create_scheduled_job(image=IMAGE, command=["true"], schedule="0 3 * * *")
    due = next_run("0 3 * * *", time.time())
    assert made.status.next_job_run_at is not None
    assert made.status.next_job_run_at.timestamp() == due
    database, day = open_database(hub.root), 86400
    start_due(database, store, due - 1)
    assert store.list() == []
    start_due(database, store, due + 2.5 * day)
    since = datetime.fromtimestamp(due, UTC)
    assert len(store.list()) == 1 and f"runs since {since} were missed" in caplog.text
    start_due(database, store, due + 3 * day)
    assert len(store.list()) == 1 and "a run is left out" in caplog.text
    store.cancel("j000001")
    start_due(database, store, due + 4 * day)
    database.close()
    [after] = hub.api.list_scheduled_jobs()
    assert after.status.last_job is not None and after.status.last_job.id == "j000002"
    assert after.status.next_job_run_at is not None
    assert after.status.next_job_run_at.timestamp() == due + 5 * day


@pytest.mark.parametrize("wrong", ["daily", "61 * * * *", "0 0 30 2 *", "@reboot"])
def test_a_wrong_schedule_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest, match="cron expression in UTC"):
        next_run(wrong, 0)
