"""The store of durable handlers while receivers start: a second one, a late handler, a mounted
application."""

import queue
import socket
import time
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient

from receiver.delivery_log import DeliveryLog, NewDelivery
from receiver.errors import AddressUnavailable, ReceiverError
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings
from tests.receiver_fixtures import SECRET, no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import body_of, dataset_update


def test_a_second_receiver_on_the_same_file_does_not_start(tmp_path: Path) -> None:
    def handler(payload: WebhookPayload) -> None: ...

    server = WebhooksServer(settings=ReceiverSettings(deliveries_path=tmp_path / "receiver.db"))
    server.add_webhook("/x", durable=True)(handler)
    server.launch(prevent_thread_lock=True, server_port=0)
    try:
        second = WebhooksServer(settings=server.settings)
        second.add_webhook("/x", durable=True)(handler)
        with pytest.raises(ReceiverError, match="Another receiver stores its deliveries"):
            second.launch(prevent_thread_lock=True, server_port=0)
    finally:
        server.close()
    second.launch(prevent_thread_lock=True, server_port=0)
    second.close()


def test_a_durable_handler_may_come_late(tmp_path: Path) -> None:
    """The server was started with none, and an earlier process left a delivery for it."""
    file = tmp_path / "receiver.db"
    log = DeliveryLog(file)
    headers = {"content-type": "application/json"}
    body = body_of(dataset_update(name="acme/left"))
    left = NewDelivery(path="/webhooks/late", id="left", headers=headers, body=body)
    log.add([left], time.time())
    log.close()
    server = WebhooksServer(settings=ReceiverSettings(port=0, deliveries_path=file))
    url = server.launch(prevent_thread_lock=True)
    handled: queue.Queue[str] = queue.Queue()

    @server.add_webhook(durable=True)
    def late(payload: WebhookPayload) -> None:
        handled.put(payload.repo.name)

    assert handled.get(timeout=10) == "acme/left"
    assert httpx.post(f"{url}/webhooks/late", json=dataset_update()).status_code == 202
    assert handled.get(timeout=10) == "acme/answers"
    server.close()
    DeliveryLog(file).close()  # the server has given the file back


def test_a_start_that_fails_leaves_the_store_to_others(tmp_path: Path) -> None:
    file = tmp_path / "receiver.db"
    server = WebhooksServer(settings=ReceiverSettings(deliveries_path=file))
    server.add_webhook("/x", durable=True)(lambda payload: None)
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(AddressUnavailable):
        server.launch(prevent_thread_lock=True, server_port=taken.getsockname()[1])
    DeliveryLog(file).close()


def test_a_late_durable_handler_is_refused_beside_another_receiver(tmp_path: Path) -> None:
    file = tmp_path / "receiver.db"
    server = WebhooksServer(settings=ReceiverSettings(port=0, deliveries_path=file))
    server.launch(prevent_thread_lock=True)
    other = DeliveryLog(file)
    with pytest.raises(ReceiverError, match="Another receiver stores its deliveries"):
        server.add_webhook(durable=True)(lambda payload: None)
    assert server.registered_webhooks == {}
    other.close()
    server.close()


def test_an_application_that_is_mounted_needs_the_lifespan(tmp_path: Path) -> None:
    settings = ReceiverSettings(deliveries_path=tmp_path / "receiver.db")
    server = WebhooksServer(webhook_secret="s3cret", settings=settings)
    handled: queue.Queue[str] = queue.Queue()
    server.add_webhook("/x", durable=True)(lambda payload: handled.put(payload.repo.name))
    without, entered = FastAPI(), FastAPI(lifespan=server.lifespan)
    for outer in (without, entered):
        outer.mount("/hooks", server.app)
    with TestClient(without, headers=SECRET) as client:
        answer = client.post("/hooks/webhooks/x", json=dataset_update())
        assert answer.status_code == 503, "not stored, so that its sender tries again"
        assert "FastAPI(lifespan=server.lifespan)" in answer.json()["error"]
    with TestClient(entered, headers=SECRET) as client:
        assert client.post("/hooks/webhooks/x", json=dataset_update()).status_code == 202
        assert handled.get(timeout=10) == "acme/answers"
        assert "<pre>http://testserver/hooks/webhooks/x</pre>" in client.get("/hooks/").text
