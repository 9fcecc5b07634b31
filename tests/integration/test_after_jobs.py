"""What follows an outcome: it is told, counted, and what the job needed is removed."""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest

from jobs.outcome import JobOutcome, OutcomeResult
from jobs.record import Job
from jobs.spec import JobSpec, RevisionRange
from jobs.store import Delivery, JobStore
from pipeline import on_outcome, retention
from pipeline.after_jobs import after_jobs
from pipeline.job_store import open_job_store
from pipeline.logs import JsonFormatter
from pipeline.outcomes import Outcomes
from pipeline.paths import Home
from pipeline.runner_metrics import RunnerMetrics
from pipeline.settings import PipelineSettings, load_settings


@pytest.fixture
def store(tmp_path: Path) -> Iterator[JobStore]:
    with JobStore.open(tmp_path / "jobs.sqlite") as store:
        yield store


def end_one(
    store: JobStore, result: OutcomeResult = "promoted", pipeline: str | None = "facts"
) -> Job:
    job = store.submit(JobSpec(command=("true",), pipeline=pipeline)).job
    assert store.claim("me", 60) is not None
    return store.finish(job.id, "me", JobOutcome(result=result, job_id=job.id))


def pipeline(told: str | tuple[str, ...]) -> PipelineSettings:
    return PipelineSettings(name="facts", dataset="local/facts", on_outcome=told)


# Outcomes


def test_each_outcome_is_told_once_also_by_the_next_process(
    store: JobStore, tmp_path: Path
) -> None:
    end_one(store)  # before anybody was there to tell
    told: list[str] = []
    file = tmp_path / "outcomes.json"
    first = Outcomes(store, file, [lambda job: told.append(job.id)])
    assert first.look() == 0
    ids = [end_one(store).id for _ in range(3)]
    assert first.look() == 3
    later = end_one(store).id
    assert Outcomes(store, file, [lambda job: told.append(job.id)]).look() == 1
    assert told == [*ids, later]


def test_outcomes_are_told_also_where_a_lost_databases_ids_begin_anew(
    store: JobStore, tmp_path: Path
) -> None:
    told: list[float | None] = []
    file = tmp_path / "outcomes.json"
    first = Outcomes(store, file, [lambda job: told.append(job.ended_at)])
    first.look()
    for _ in range(2):
        end_one(store)
    first.look()
    with JobStore.open(tmp_path / "new.sqlite") as new:
        job = end_one(new)
        assert job.id == "j000001"
        assert Outcomes(new, file, [lambda job: told.append(job.ended_at)]).look() == 1
    assert told[2:] == [job.ended_at]


def test_an_outcome_is_told_also_where_the_clock_was_set_back(tmp_path: Path) -> None:
    now = [1000.0]
    told: list[str] = []
    with JobStore.open(tmp_path / "jobs.sqlite", clock=lambda: now[0]) as store:
        outcomes = Outcomes(store, tmp_path / "o.json", [lambda job: told.append(job.id)])
        outcomes.begin()
        ids = [end_one(store).id]
        outcomes.look()
        now[0] -= 30
        ids.append(end_one(store).id)
        assert outcomes.look() == 1
    assert told == ids


def test_what_goes_wrong_while_telling_keeps_nobody_else_from_it(
    store: JobStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[str] = []

    def breaks(job: Job) -> None:
        raise RuntimeError("no way")

    outcomes = Outcomes(store, tmp_path / "o.json", [breaks, lambda job: told.append(job.id)])
    outcomes.look()
    job = end_one(store)
    outcomes.look()
    assert told == [job.id]
    assert "no way" in caplog.text


def test_the_last_outcome_is_told_before_the_thread_ends(store: JobStore, tmp_path: Path) -> None:
    told: list[str] = []
    outcomes = Outcomes(store, tmp_path / "o.json", [lambda job: told.append(job.id)])
    outcomes.look()
    stop = threading.Event()
    thread = threading.Thread(target=outcomes.follow, args=(stop,))
    thread.start()
    with JobStore.open(tmp_path / "jobs.sqlite") as other:
        job = end_one(other)
    stop.set()
    thread.join()
    assert told == [job.id]


def test_commit_to_serving_counts_from_the_commit_that_an_earlier_job_failed_over(
    tmp_path: Path,
) -> None:
    now = time.time()
    with JobStore.open(tmp_path / "jobs.sqlite", clock=lambda: now) as store:
        for number in range(2):
            revisions = RevisionRange(
                repo="local/facts", ref="refs/heads/main", old_sha=None, new_sha=str(number)
            )
            spec = JobSpec(command=("true",), pipeline="facts", revisions=revisions)
            store.submit(spec, delivery=Delivery(source="hub", id=f"d{number}", body="{}"))
            now += 60
            if number == 0:
                failing = store.claim("me", 60)
                assert failing is not None
        store.finish(failing.id, "me", JobOutcome(result="failed", job_id=failing.id))
        successor = store.claim("me", 60)
        assert successor is not None
        job = store.finish(successor.id, "me", JobOutcome(result="promoted", job_id=successor.id))
        metrics = RunnerMetrics(store)
        metrics.count(job)
        total = metrics.registry.get_sample_value(
            "pipeline_commit_to_serving_seconds_sum", {"pipeline": "facts"}
        )
        assert total == pytest.approx(120)


# on_outcome


@pytest.fixture
def url_and_bodies() -> Iterator[tuple[str, list[dict[str, object]]]]:
    bodies: list[dict[str, object]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            bodies.append({**json.loads(body), "id": self.headers["Webhook-Id"]})
            self.send_response(503 if self.path == "/busy" and len(bodies) == 1 else 204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", bodies
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_url_gets_the_outcome_again_where_it_was_busy(
    store: JobStore,
    tmp_path: Path,
    url_and_bodies: tuple[str, list[dict[str, object]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_outcome, "WAITS_SECONDS", (0.0, 0.0))
    url, bodies = url_and_bodies
    job = end_one(store, "rejected")
    assert on_outcome.tell(pipeline(f"{url}/busy"), job, tmp_path)
    assert [(body["pipeline"], body["result"], body["id"]) for body in bodies] == [
        ("facts", "rejected", job.id)
    ] * 2


def test_a_command_gets_the_outcome_on_its_input_and_ids_in_its_environment(
    store: JobStore, tmp_path: Path
) -> None:
    code = (
        "import json, os, sys; "
        "json.dump([json.load(sys.stdin), os.environ['JOB_ID'], os.environ['PIPELINE_OUTCOME']], "
        "open(os.environ['JOB_DIR'] + '/told', 'w'))"
    )
    job = end_one(store)
    assert on_outcome.tell(pipeline((sys.executable, "-c", code)), job, tmp_path)
    outcome, job_id, result = json.loads((tmp_path / "told").read_text())
    assert (outcome["result"], job_id, result) == ("promoted", job.id, "promoted")


@pytest.mark.parametrize(
    "told",
    [
        ("there-is-no-such-program",),
        (sys.executable, "-c", "import sys; sys.exit('the list is closed')"),
        "http://127.0.0.1:1/",
    ],
)
def test_who_cannot_be_told_is_logged(
    told: str | tuple[str, ...],
    store: JobStore,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(on_outcome, "WAITS_SECONDS", (0.0,))
    job = end_one(store)
    assert not on_outcome.tell(pipeline(told), job, tmp_path)
    assert f"on_outcome of facts for {job.id}" in caplog.text


def test_a_command_that_hangs_is_ended(
    store: JobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_outcome, "TIMEOUT_SECONDS", 0.2)
    began = time.monotonic()
    assert not on_outcome.tell(pipeline(("sleep", "60")), end_one(store), tmp_path)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("wrong", ["ftp://example.org", "example.org", 5])
def test_what_is_neither_url_nor_command_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="on_outcome"):
        PipelineSettings.model_validate({"name": "a", "dataset": "b/c", "on_outcome": wrong})


# Retention


def test_folders_of_old_jobs_go_and_their_place_in_the_list_stays(
    store: JobStore, tmp_path: Path
) -> None:
    old, of_a_release, running = end_one(store), end_one(store), None
    running = store.submit(JobSpec(command=("true",), pipeline="facts")).job
    for job in (old, of_a_release, running):
        (tmp_path / job.id).mkdir()
        (tmp_path / job.id / "log.txt").write_text("words")
    assert retention.prune_job_folders(store, tmp_path, keep_days=1) == []
    removed = retention.prune_job_folders(store, tmp_path, keep_days=1e-12, kept={of_a_release.id})
    assert removed == [old.id]
    assert not (tmp_path / old.id).exists()
    assert store.get(old.id).outcome is not None


def test_old_folders_that_were_put_aside_are_removed_too(store: JobStore, tmp_path: Path) -> None:
    aside, lately = (tmp_path / f"j000001.stale-{number}" for number in (1, 2))
    for folder in (aside, lately):
        folder.mkdir()
        (folder / "log.txt").write_text("of another database")
    os.utime(aside, (time.time() - 3 * 86400,) * 2)
    assert retention.prune_job_folders(store, tmp_path, keep_days=1) == [aside.name]
    assert lately.exists() and not aside.exists()


def test_what_only_a_next_attempt_needed_goes_at_once(store: JobStore, tmp_path: Path) -> None:
    command = ("python", "-m", "pipeline.retrain")
    job = store.submit(JobSpec(command=command, pipeline="facts")).job
    folder = tmp_path / job.id
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints" / "step-1.pt").write_bytes(b"much")
    for name in (".outcome.json.123", ".lock", "outcome.json"):
        (folder / name).touch()
    retention.clear(job, folder)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "outcome.json"]
    retention.clear(job, tmp_path / "gone")


def test_what_a_trainer_of_ones_own_calls_checkpoints_stays(
    store: JobStore, tmp_path: Path
) -> None:
    job = store.submit(JobSpec(command=("./train.sh",), pipeline="facts")).job
    (tmp_path / "checkpoints").mkdir()
    retention.clear(job, tmp_path)
    assert (tmp_path / "checkpoints").is_dir()


# Metrics and logs


def test_metrics_tell_outcomes_seconds_and_the_queue(store: JobStore) -> None:
    metrics = RunnerMetrics(store)
    metrics.count(end_one(store))
    metrics.count(end_one(store, "rejected"))
    metrics.count(end_one(store, pipeline=None))
    store.submit(JobSpec(command=("true",), pipeline="facts", debounce_seconds=60))

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(name, labels)

    assert value("pipeline_outcomes_total", pipeline="facts", result="promoted") == 1
    assert value("pipeline_outcomes_total", pipeline="facts", result="rejected") == 1
    assert value("pipeline_commit_to_serving_seconds_count", pipeline="facts") == 1
    assert value("pipeline_job_seconds_count", pipeline="facts") == 2
    assert value("pipeline_jobs", pipeline="facts", state="scheduling") == 1
    age = value("pipeline_queue_age_seconds", pipeline="facts")
    assert age is not None and 0 <= age < 60


def test_json_logs_carry_ids_and_exceptions() -> None:
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    handler = Kept()
    handler.setFormatter(JsonFormatter("runner"))
    logger = logging.getLogger("tests.json")
    logger.addHandler(handler)
    try:
        ids = {"job_id": "j000001", "delivery_ids": ["d1"]}
        logger.warning("Job %s\nis lost", "j000001", extra=ids)
        try:
            raise ValueError("seven")
        except ValueError:
            logger.exception("it broke")
    finally:
        logger.removeHandler(handler)
    first, second = map(json.loads, lines)
    assert first["job_id"] == "j000001" and first["delivery_ids"] == ["d1"]
    assert first["service"] == "runner" and first["level"] == "warning"
    assert first["message"] == "Job j000001\nis lost"
    assert "ValueError: seven" in second["exception"] and "job_id" not in second


def test_the_receiver_counts_refused_requests_too() -> None:
    from receiver.metrics import measure
    from receiver.server import WebhooksServer
    from receiver.settings import ReceiverSettings

    server = WebhooksServer(webhook_secret="s", settings=ReceiverSettings(port=0))
    measure(server.app)

    @server.add_webhook("/echo")
    async def echo() -> dict[str, bool]:
        return {"ok": True}

    url = server.launch(prevent_thread_lock=True)
    try:
        assert httpx.post(f"{url}/webhooks/echo", json={}).status_code == 401
        assert httpx.post(f"{url}/webhooks/{'x' * 40}", json={}).status_code == 404
        text = httpx.get(f"{url}/metrics").text
    finally:
        server.close()
    assert 'receiver_requests_total{path="/webhooks/echo",status="401"} 1.0' in text
    assert 'path="other",status="404"' in text and "xxx" not in text


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
            while not (home.jobs_dir / "outcomes.json").exists():
                time.sleep(0.01)
            (home.jobs_dir / "j000001").mkdir()
            end_one(store)
    assert f"no metrics on port {port}" in caplog.text
    assert json.loads(told.read_text())["result"] == "promoted"
