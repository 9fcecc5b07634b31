"""`launch_job`: what a handler returns is on disk, once for each delivery."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from starlette.testclient import TestClient

from jobs.store import JobStore
from pipeline.paths import Home
from receiver import launch_job
from receiver.errors import NoJobStore
from receiver.payload import WebhookPayload
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import dataset_update
from tests.receiver_scripts import running


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JobStore]:
    """The store of the stack whose state folder is $PIPELINE_HOME."""
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "state"))
    file = Home.find().jobs_database
    file.parent.mkdir(parents=True)
    with JobStore.open(file) as store:
        yield store


def test_one_job_for_each_delivery_and_command(store: JobStore) -> None:
    def server() -> WebhooksServer:
        """Of another process: it knows no answer of the one before."""
        made = WebhooksServer()

        @made.add_webhook
        def plain(payload: WebhookPayload) -> list[str]:
            return [launch_job(["true", word], payload) for word in ("a", "b")]

        @made.add_webhook("/async")
        async def asynchronous(payload: WebhookPayload) -> list[str]:
            return [launch_job(["true", "a"], payload)]

        return made

    def post(path: str, **headers: str) -> list[str]:
        with TestClient(server().app, base_url="http://localhost") as client:
            ids: list[str] = client.post(path, json=dataset_update(), headers=headers).json()
            return ids

    first = post("/webhooks/plain", **{"Webhook-Id": "d1"})
    assert len(set(first)) == 2, "two commands, two jobs"
    assert post("/webhooks/plain", **{"Webhook-Id": "d1"}) == first
    other = post("/webhooks/plain", **{"Webhook-Id": "d2"})
    assert not set(other) & set(first)
    assert post("/webhooks/async", **{"Webhook-Id": "d1"}) != first[:1], "another handler"
    # A sender that sends no id: the body tells a repeat.
    assert post("/webhooks/async") == post("/webhooks/async")
    assert len(store.list()) == 6


def test_outside_of_a_handler_each_call_is_a_job(store: JobStore) -> None:
    payload = dataset_update()
    ids = {launch_job(["true"], payload), launch_job(["true"], WebhookPayload(**payload))}
    assert {job.id for job in store.list()} == ids and len(ids) == 2
    for job in store.list():
        assert job.payload is not None and job.payload["repo"]["name"] == "acme/answers"


def test_a_store_that_is_not_there_is_an_error_that_the_sender_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPELINE_HOME", str(tmp_path / "nothing"))
    with pytest.raises(NoJobStore, match=rf"{tmp_path}/nothing/jobs/jobs.sqlite.*pipeline up"):
        launch_job(["true"], dataset_update())
    assert list(tmp_path.iterdir()) == [], "no store that no runner would look into"
    monkeypatch.setenv("PIPELINE_JOBS__DATABASE_URL", str(tmp_path / "jobs.db"))
    with pytest.raises(NoJobStore, match=r"jobs\.db"):
        launch_job(["true"], dataset_update())
    JobStore.open(tmp_path / "jobs.db").close()
    for chosen in ({}, {"store": tmp_path / "jobs.db"}, {"store": f"sqlite:///{tmp_path}/jobs.db"}):
        launch_job(["true"], dataset_update(), **chosen)
    with JobStore.open(tmp_path / "jobs.db") as store:
        assert len(store.list()) == 3


SCRIPT = """
from receiver.server import WebhookPayload, launch_job, webhook_endpoint

@webhook_endpoint
def work(payload: WebhookPayload):
    return {"job": launch_job(["true"], payload)}

work.launch(server_port=0)
"""


def test_a_delivery_that_is_repeated_after_a_kill_has_one_job(
    store: JobStore, tmp_path: Path
) -> None:
    answered: dict[str, str] = {}
    with running(tmp_path, SCRIPT) as (url, _, process):
        killer = threading.Timer(0.03, process.send_signal, [signal.SIGKILL])
        with contextlib.suppress(httpx.TransportError), httpx.Client() as client:
            for number in range(10_000):
                id = {"Webhook-Id": f"d{number}"}
                answer = client.post(f"{url}/webhooks/work", json=dataset_update(), headers=id)
                answered[f"d{number}"] = answer.json()["job"]
                if number == 10:
                    killer.start()
        killer.join()
    stored = len(store.list(limit=20_000))
    assert len(answered) <= stored <= len(answered) + 1, "only the last one had no answer"
    with running(tmp_path, SCRIPT) as (url, *_), httpx.Client() as client:
        for sent, job in (*answered.items(), (f"d{len(answered)}", None)):
            id = {"Webhook-Id": sent}
            again = client.post(f"{url}/webhooks/work", json=dataset_update(), headers=id)
            assert job in (again.json()["job"], None)
    assert len(store.list(limit=20_000)) == len(answered) + 1
