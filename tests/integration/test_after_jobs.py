"""What follows an outcome: old folders are removed, and metrics and logs tell of the job."""

import json
import logging
import re
import socket
import time
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.fernet import Fernet
from prometheus_client import generate_latest
from starlette.testclient import TestClient

from jobs.errors import JobNotFound
from jobs.spec import JobSpec
from jobs.store import JobStore
from pipeline.hub.database import open_database
from pipeline.hub.routes.webhooks import WebhookRequest, create_webhook
from pipeline.hub.webhooks import HubWatchedItem
from pipeline.logs import JsonFormatter
from pipeline.paths import Home
from pipeline.runner.after_jobs import (
    RunnerMetrics,
    after_jobs,
    prune,
    prune_job_folders,
    remove_unneeded_files,
)
from pipeline.runner.job_store import open_job_store
from pipeline.settings import Settings, load_settings
from serving.weights.release import RELEASE_FILE
from tests.after_jobs_fixtures import end_one, store
from tests.jobs_fixtures import DONE, FAILED, claim, delivery, spec
from tests.serving_fixtures import echo_release

__all__ = ["store"]


def test_commit_to_serving_counts_from_the_commit_that_an_earlier_job_failed_over(
    tmp_path: Path,
) -> None:
    now = time.time()
    with JobStore.open(tmp_path / "jobs.sqlite", clock=lambda: now) as store:
        store.submit(spec("0", pipeline="facts"), delivery=delivery("d0"))
        now += 60
        failing = claim(store)
        store.submit(spec("1", pipeline="facts"), delivery=delivery("d1"))
        now += 60
        store.finish(failing.id, "me", FAILED)
        job = store.finish(claim(store).id, "me", DONE)
        metrics = RunnerMetrics(store)
        metrics.count(job)
        total = metrics.registry.get_sample_value(
            "pipeline_commit_to_serving_seconds_sum", {"pipeline": "facts"}
        )
        assert total == pytest.approx(120)


# Retention


def test_folders_of_old_jobs_go_and_their_place_in_the_list_stays(
    store: JobStore, tmp_path: Path
) -> None:
    old, of_a_release, running = end_one(store), end_one(store), None
    running = store.submit(JobSpec(command=("true",), pipeline="facts"))
    for job in (old, of_a_release, running):
        (tmp_path / job.id).mkdir()
        (tmp_path / job.id / "log.txt").write_text("words")
    prune_job_folders(store, tmp_path, keep_days=1)
    assert (tmp_path / old.id).exists()
    prune_job_folders(store, tmp_path, keep_days=1e-12, kept={of_a_release.id})
    assert {each.name for each in tmp_path.glob("j0*/")} == {of_a_release.id, running.id}
    assert store.get(old.id).outcome is not None


def test_jobs_are_forgotten_when_no_delivery_can_be_repeated_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    home, settings, now = Home(tmp_path), load_settings(), time.time()
    home.hub_dir.mkdir()
    home.jobs_dir.mkdir()
    database = open_database(home.hub_dir)
    with JobStore.open(home.jobs_database, clock=lambda: now) as store:
        copied, old, of_a_release = (end_one(store) for _ in range(3))
        echo_release(home.releases_dir / "facts", 1, job_id=of_a_release.id)
        with database.write() as connection:
            request = WebhookRequest(
                jobSourceId=copied.id, watched=(HubWatchedItem(type="user", name="local"),)
            )
            create_webhook(connection, request, Fernet.generate_key())
        database.close()
        now += 89 * 86400
        prune(settings, home, store)
        assert len(store.list()) == 3
        now += 2 * 86400
        longer = settings.model_copy(
            update={"hub": settings.hub.model_copy(update={"keep_deliveries_days": 91})}
        )
        prune(longer, home, store)
        assert len(store.list()) == 3, "the hub can still replay their deliveries"
        prune(settings, home, store)
        assert [job.id for job in store.list()] == [of_a_release.id, copied.id]
        with pytest.raises(JobNotFound):
            store.get(old.id)


def test_nothing_is_removed_while_a_manifest_cannot_be_read(tmp_path: Path) -> None:
    home, now = Home(tmp_path), 0.0
    (home.releases_dir / "facts" / "r000001-00000000" / RELEASE_FILE).mkdir(parents=True)
    home.jobs_dir.mkdir()
    with JobStore.open(home.jobs_database, clock=lambda: now) as store:
        folder = home.jobs_dir / end_one(store).id
        folder.mkdir()
        now = 1000 * 86400.0
        with pytest.raises(OSError, match=RELEASE_FILE):
            prune(Settings(), home, store)
        assert folder.is_dir()
        (home.releases_dir / "facts" / "r000001-00000000" / RELEASE_FILE).rmdir()
        prune(Settings(), home, store)
        assert not folder.exists()


def test_what_only_a_next_attempt_needed_goes_at_once(store: JobStore, tmp_path: Path) -> None:
    command = ("python", "-m", "pipeline.retrain")
    settings = {"train": {"checkpoint_url": f"{tmp_path}/store"}}
    job = store.submit(JobSpec(command=command, pipeline="facts", settings=settings))
    folder = tmp_path / job.id
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-1.pt").write_bytes(b"much")
    (tmp_path / "store" / job.id / "training").mkdir(parents=True)
    (tmp_path / "store" / "another").mkdir()
    (folder / "outcome.json").touch()
    (folder / ".replacing-1234").touch()
    remove_unneeded_files(job, folder)
    assert [path.name for path in folder.iterdir()] == ["outcome.json"]
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["another"]
    remove_unneeded_files(job, tmp_path / "gone")


def test_what_a_trainer_of_ones_own_calls_checkpoints_stays(
    store: JobStore, tmp_path: Path
) -> None:
    job = store.submit(JobSpec(command=("./train.sh",), pipeline="facts"))
    folder = tmp_path / job.id
    (folder / "checkpoints").mkdir(parents=True)
    (folder / ".ckpt.10.pt").touch()
    remove_unneeded_files(job, folder)
    assert sorted(path.name for path in folder.iterdir()) == [".ckpt.10.pt", "checkpoints"]


# Metrics and logs


def test_metrics_tell_outcomes_seconds_and_the_queue(store: JobStore) -> None:
    metrics = RunnerMetrics(store)
    metrics.count(end_one(store))
    metrics.count(end_one(store, "rejected"))
    metrics.count(end_one(store, pipeline=None))
    metrics.count(replace(end_one(store), by_hand=True))
    store.submit(JobSpec(command=("true",), pipeline="facts", debounce_seconds=60))
    store.submit(JobSpec(command=("true",), pipeline="facts", debounce_seconds=60), by_hand=True)

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("pipeline_outcomes_total", pipeline="facts", result="promoted") == 2
    assert value("pipeline_outcomes_total", pipeline="facts", result="rejected") == 1
    assert value("pipeline_commit_to_serving_seconds_count", pipeline="facts") == 1
    assert value("pipeline_job_seconds_count", pipeline="facts") == 3
    shown = generate_latest(metrics.registry).decode()
    assert len(re.findall("^pipeline_queue_age_seconds{", shown, re.MULTILINE)) == 1
    age = value("pipeline_queue_age_seconds", pipeline="facts")
    assert age is not None and 0 <= age < 60


def test_json_logs_carry_ids_and_exceptions(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("tests.json")
    ids = {"job_id": "j000001", "delivery_ids": ["d1"]}
    logger.warning("Job %s\nis lost", "j000001", extra=ids)
    try:
        raise ValueError("seven")
    except ValueError:
        logger.exception("it broke")
    formatter = JsonFormatter("runner")
    first, second = (json.loads(formatter.format(record)) for record in caplog.records)
    assert first["job_id"] == "j000001" and first["delivery_ids"] == ["d1"]
    assert first["service"] == "runner" and first["level"] == "warning"
    assert first["message"] == "Job j000001\nis lost"
    assert "ValueError: seven" in second["exception"] and "job_id" not in second


def test_the_receiver_counts_refused_requests_too() -> None:
    from receiver.webhooks_server import WebhooksServer, measure

    server = WebhooksServer(webhook_secret="s")
    measure(server)
    server.add_webhook("/echo")(lambda payload: None)
    with TestClient(server.app, base_url="http://localhost") as client:
        assert client.post("/webhooks/echo", json={}).status_code == 401
        assert client.post(f"/webhooks/{'x' * 40}", json={}).status_code == 404
        text = client.get("/metrics").text
    assert 'receiver_requests_total{path="/webhooks/echo",status="401"} 1.0' in text
    assert "xxx" not in text, "a stranger makes no series"


def test_a_metrics_port_that_is_taken_is_logged_and_outcomes_are_told_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, told = Home(root=tmp_path), tmp_path / "told"
    (tmp_path / "pipeline.toml").write_text(
        '[[pipelines]]\nname = "facts"\ndataset = "local/facts"\n'
        f'on_outcome = ["sh", "-c", "cat > {told}"]\n'
    )
    monkeypatch.setenv("PIPELINE_SETTINGS", str(tmp_path / "pipeline.toml"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("PIPELINE_JOBS__METRICS_PORT", str(port))
        settings = load_settings()
        with (
            open_job_store(settings, home) as store,
            after_jobs(settings, home, serves_metrics=True),
        ):
            (home.jobs_dir / "j000001").mkdir()
            end_one(store)
    assert f"metrics cannot use port {port}" in caplog.text
    assert json.loads(told.read_text())["result"] == "promoted"
