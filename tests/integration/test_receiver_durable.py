"""Durable handlers: answered at once, called until they succeed, also by the next process."""

import asyncio
import contextlib
import dataclasses
import itertools
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import Request
from starlette.testclient import TestClient
from typer.testing import CliRunner

from pipeline.cli.main import app
from receiver import durable
from receiver.dead_letters import list_dead_letters
from receiver.delivery_log import DeliveryLog, NewDelivery, StoredDelivery
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings
from tests.receiver_fixtures import SECRET, no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import GITHUB_PUSH, body_of, dataset_update, hmac_hex

JSON = {"content-type": "application/json"}


@pytest.fixture
def server(tmp_path: Path) -> WebhooksServer:
    settings = ReceiverSettings(deliveries_path=tmp_path / "state" / "receiver.db")
    return WebhooksServer(webhook_secret="s3cret", settings=settings)


def await_that(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def test_the_sender_is_answered_before_the_handler_is_done(server: WebhooksServer) -> None:
    may_end, calls = threading.Event(), []

    @server.add_webhook(durable=True)
    def x(payload: WebhookPayload, request: Request) -> None:
        assert may_end.wait(20)
        calls.append((payload.repo.name, request.state.delivery_id, dict(request.headers)))

    with TestClient(server.app, headers=SECRET) as client:
        headers = {"Webhook-Id": "d1"}
        answers = [
            client.post("/webhooks/x", json=dataset_update(), headers=headers) for _ in range(2)
        ]
        assert [answer.status_code for answer in answers] == [202, 202]
        assert answers[0].json() == {"delivery": "d1", "is_new": True}
        assert answers[1].json() == {"delivery": "d1", "is_new": False}
        assert calls == []
        may_end.set()
        await_that(lambda: calls)
    ((name, delivery_id, kept),) = calls
    assert (name, delivery_id, kept["webhook-id"]) == ("acme/answers", "d1", "d1")
    assert "x-webhook-secret" not in kept


def test_a_handler_that_fails_is_called_until_it_succeeds(server: WebhooksServer) -> None:
    calls: list[float] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload) -> None:
        calls.append(time.monotonic())
        if len(calls) < 3:
            raise RuntimeError("not yet")

    with TestClient(server.app, headers=SECRET) as client:
        client.post("/webhooks/x", json=dataset_update())
        await_that(lambda: len(calls) == 3)
    pauses = [later - earlier for earlier, later in itertools.pairwise(calls)]
    assert pauses[0] >= 0.9
    assert pauses[1] >= 1.9


def test_a_handler_that_failed_for_weeks_is_called_once_more(server: WebhooksServer) -> None:
    path = server.settings.deliveries_path
    body = body_of(dataset_update())
    with contextlib.closing(DeliveryLog(path)) as log:
        log.add([NewDelivery(path="/webhooks/x", id="d1", headers=JSON, body=body)], time.time())
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE deliveries SET attempts = 5000")
    calls: list[str] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload, request: Request) -> None:
        calls.append(request.state.delivery_id)
        raise RuntimeError("not yet")

    with TestClient(server.app):
        await_that(lambda: calls)
    with contextlib.closing(DeliveryLog(path)) as log:
        assert log.due(time.time() + 1000, ["/webhooks/x"]) == []
    (letter,) = list_dead_letters(path)
    assert (letter.id, letter.attempts) == ("d1", 5001)


def test_the_pauses_between_the_calls_grow_to_ten_minutes() -> None:
    delivery = StoredDelivery(path="/x", id="d1", headers={}, body=b"", attempts=0)
    pauses = [
        (durable._failed_result(dataclasses.replace(delivery, attempts=made), "no").due_at or 0)
        - time.time()
        for made in range(durable.MAX_ATTEMPTS)
    ]
    assert pauses[:10] == pytest.approx([2**made for made in range(10)], abs=1)
    assert pauses[10:-1] == pytest.approx([600] * 9, abs=1)
    assert pauses[-1] < 0, "it was the last one"


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_a_stop_waits_for_a_handler_at_work_and_not_for_ever(
    tmp_path: Path, ends_in_time: bool
) -> None:
    settings = ReceiverSettings(
        deliveries_path=tmp_path / "receiver.db", shutdown_seconds=20 if ends_in_time else 1
    )
    calls: list[str] = []
    is_at_work, may_end = threading.Event(), threading.Event()

    def served() -> WebhooksServer:
        server = WebhooksServer(webhook_secret="s3cret", settings=settings)

        @server.add_webhook(durable=True)
        async def x(payload: WebhookPayload, request: Request) -> None:
            if not calls:
                is_at_work.set()
                while not may_end.is_set():
                    await asyncio.sleep(0.01)
            calls.append(request.state.delivery_id)

        return server

    with TestClient(served().app, headers=SECRET) as client:
        client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d1"})
        assert is_at_work.wait(20)
        if ends_in_time:
            threading.Timer(0.3, may_end.set).start()  # mostly after the stop has begun
    assert calls == (["d1"] if ends_in_time else [])
    calls.append("stopped")
    with TestClient(served().app, headers=SECRET) as client:
        client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d2"})
        await_that(lambda: "d2" in calls)
    assert calls == (["d1", "stopped", "d2"] if ends_in_time else ["stopped", "d1", "d2"])


def test_a_disk_that_is_full_for_a_while_ends_nothing(
    server: WebhooksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload, request: Request) -> None:
        calls.append(request.state.delivery_id)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with TestClient(server.app, headers=SECRET) as client:
        with monkeypatch.context() as disk:
            disk.setattr(DeliveryLog, "store_results", full)
            client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d1"})
            await_that(lambda: "database or disk is full" in caplog.text)
        client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d2"})
        await_that(lambda: calls == ["d1", "d2"])
    with contextlib.closing(DeliveryLog(server.settings.deliveries_path)) as log:
        assert log.due(time.time(), ["/webhooks/x"]) == [], "both ends are written"


def test_an_error_that_nobody_expects_does_not_end_the_worker(
    server: WebhooksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[str] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload, request: Request) -> None:
        calls.append(request.state.delivery_id)

    def broken(*_: object) -> None:
        raise RuntimeError("a mistake of ours")

    with TestClient(server.app, headers=SECRET) as client:
        with monkeypatch.context() as patched:
            patched.setattr(DeliveryLog, "due", broken)
            client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d1"})
            await_that(lambda: "a mistake of ours" in caplog.text)
        await_that(lambda: calls == ["d1"])


def test_a_handler_whose_own_task_was_cancelled_is_called_again(server: WebhooksServer) -> None:
    calls: list[str] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload, request: Request) -> None:
        calls.append(request.state.delivery_id)
        if len(calls) == 1:
            task = asyncio.create_task(asyncio.sleep(60))
            task.cancel()
            await task

    with TestClient(server.app, headers=SECRET) as client:
        client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": "d1"})
        await_that(lambda: calls == ["d1", "d1"])


def test_after_its_removal_a_function_is_not_called(server: WebhooksServer) -> None:
    """Its deliveries, in the file and in memory, wait for the next function of the same path."""
    path = server.settings.deliveries_path
    waiting: dict[str, Any] = {"headers": JSON, "body": body_of(dataset_update())}
    with contextlib.closing(DeliveryLog(path)) as log:
        for name in ("gone", "x"):
            new = [
                NewDelivery(path=f"/webhooks/{name}", id=id, repository="acme/a", **waiting)
                for id in ("d1", "d2")
            ]
            log.add(new, time.time())
    is_at_work, may_end = threading.Event(), threading.Event()
    calls: list[tuple[str, str]] = []

    @server.add_webhook(durable=True)
    async def gone(payload: WebhookPayload, request: Request) -> None:
        calls.append(("gone", request.state.delivery_id))

    @server.add_webhook(durable=True)
    def x(payload: WebhookPayload, request: Request) -> None:
        is_at_work.set()
        assert may_end.wait(20)
        calls.append(("x", request.state.delivery_id))

    server.remove_webhook("/webhooks/gone")
    with TestClient(server.app, headers=SECRET):
        assert is_at_work.wait(20)
        server.remove_webhook("/webhooks/x")
        may_end.set()
        await_that(lambda: calls)

    assert calls == [("x", "d1")]
    with contextlib.closing(DeliveryLog(path)) as log:
        left = log.due(time.time(), ["/webhooks/gone", "/webhooks/x"])
    assert [(each.path, each.id, each.attempts) for each in left] == [
        ("/webhooks/gone", "d1", 0),
        ("/webhooks/gone", "d2", 0),
        ("/webhooks/x", "d2", 0),
    ]

    @server.add_webhook("x", durable=True)
    async def later(payload: WebhookPayload, request: Request) -> None:
        calls.append(("later", request.state.delivery_id))

    with TestClient(server.app, headers=SECRET):
        await_that(lambda: ("later", "d2") in calls)


def test_a_removed_function_with_many_deliveries_does_not_hold_up_the_others(
    server: WebhooksServer,
) -> None:
    """The first call removes its own function, so no call of `x` ends after the worker has begun to
    drop the other deliveries to `x`."""
    num_x = 5 * durable.MAX_RUNNING
    with contextlib.closing(DeliveryLog(server.settings.deliveries_path)) as log:
        body = body_of(dataset_update())
        new = [
            NewDelivery(path=path, id=f"d{n}", headers=JSON, body=body, repository=f"acme/{n}")
            for path, count in (("/webhooks/x", num_x), ("/webhooks/y", 1))
            for n in range(count)
        ]
        log.add(new, time.time())
    calls: list[str] = []

    @server.add_webhook(durable=True)
    async def x(payload: WebhookPayload) -> None:
        if "/webhooks/x" in server.registered_webhooks:
            server.remove_webhook("/webhooks/x")

    @server.add_webhook(durable=True)
    async def y(payload: WebhookPayload) -> None:
        calls.append("y")

    with TestClient(server.app):
        await_that(lambda: calls)


def test_what_can_never_succeed_is_refused_at_once(server: WebhooksServer) -> None:
    server.add_webhook("/x", durable=True)(lambda payload: None)
    with TestClient(server.app, headers=SECRET) as client:
        answer = client.post("/webhooks/x", json={"event": {}})
        assert answer.status_code == 422
        assert answer.json()["error"].startswith(
            "The body is not a payload that this handler takes: body.event"
        )
        assert client.post("/webhooks/x", content=b"{").status_code == 422
        wrong = {"X-Webhook-Secret": "wrong"}
        assert client.post("/webhooks/x", json=dataset_update(), headers=wrong).status_code == 403


def test_a_push_of_another_sender_is_stored_as_the_hubs_payload(server: WebhooksServer) -> None:
    names = []

    @server.add_webhook("/x", proof="github", durable=True)
    async def x(payload: WebhookPayload) -> None:
        names.append(payload.repo.name)

    body = body_of(GITHUB_PUSH)
    headers = {"X-GitHub-Event": "push", "X-GitHub-Delivery": "g1"}
    headers["X-Hub-Signature-256"] = "sha256=" + hmac_hex("s3cret", body)
    with TestClient(server.app) as client:
        answer = client.post("/webhooks/x", content=body, headers=headers)
        assert answer.json() == {"delivery": "g1", "is_new": True}
        await_that(lambda: names)
    assert names == ["Codertocat/Hello-World"]


def test_one_that_hangs_does_not_hold_up_the_others(server: WebhooksServer) -> None:
    may_end, done = threading.Event(), []

    @server.add_webhook(durable=True)
    def x(payload: WebhookPayload, request: Request) -> None:
        if request.state.delivery_id == "slow":
            assert may_end.wait(20)
        done.append(request.state.delivery_id)

    with TestClient(server.app, headers=SECRET) as client:
        for id in ("slow", "quick"):
            client.post("/webhooks/x", json=update_of(id), headers={"Webhook-Id": id})
        await_that(lambda: done == ["quick"])
        may_end.set()
        await_that(lambda: done == ["quick", "slow"])


def update_of(repository: str) -> dict[str, Any]:
    payload = dataset_update()
    payload["repo"] = {**payload["repo"], "name": f"acme/{repository}"}
    return payload


def test_events_of_one_repository_are_handled_in_their_order(server: WebhooksServer) -> None:
    may_end, done = threading.Event(), []
    failed: list[str] = []

    @server.add_webhook(durable=True)
    def x(payload: WebhookPayload, request: Request) -> None:
        id = request.state.delivery_id
        if id == "a0":
            assert may_end.wait(20)
        if id == "a1" and not failed:
            failed.append(id)
            raise RuntimeError("not yet")
        done.append(id)

    with TestClient(server.app, headers=SECRET) as client:
        for number in range(12):
            for name in "ab":
                headers = {"Webhook-Id": f"{name}{number}"}
                client.post("/webhooks/x", json=update_of(name), headers=headers)
        await_that(lambda: len(done) == 12)
        assert done == [f"b{number}" for number in range(12)]
        may_end.set()
        await_that(lambda: len(done) == 24)
    assert done[12:] == [f"a{number}" for number in range(12)]
    assert failed == ["a1"]


def test_after_its_last_call_an_event_is_a_dead_letter_that_can_be_replayed(
    server: WebhooksServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable, "MAX_ATTEMPTS", 2)
    monkeypatch.setattr(durable, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(durable, "LOOK_SECONDS", 0.05)
    file = server.settings.deliveries_path
    calls: list[str] = []
    repaired = threading.Event()

    @server.add_webhook(durable=True)
    def x(payload: WebhookPayload, request: Request) -> None:
        calls.append(request.state.delivery_id)
        if request.state.delivery_id == "poison" and not repaired.is_set():
            raise RuntimeError("it is poison")

    def pipeline(*arguments: str) -> str:
        result = CliRunner().invoke(app, ["receiver", *arguments, "--file", str(file)])
        assert result.exit_code == 0, result.exception
        return result.stdout

    with TestClient(server.app, headers=SECRET) as client:
        for id in ("poison", "next"):
            client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": id})
        await_that(lambda: calls == ["poison", "poison", "next"])
        await_that(lambda: pipeline("dead", "--quiet") == "poison\n")
        assert "delivery poison is given up after 2 calls" in caplog.text
        (letter,) = json.loads(pipeline("dead", "--json"))
        assert (letter["path"], letter["repository"]) == ("/webhooks/x", "dataset/acme/answers")
        assert letter["failure"] == "RuntimeError: it is poison"
        assert json.loads(letter["body"]) == dataset_update()
        assert "it is poison" in pipeline("dead")
        repaired.set()
        assert pipeline("replay", "--all") == "the receiver will handle again: poison\n"
        await_that(lambda: len(calls) == 4)
        await_that(lambda: "No dead letter." in pipeline("dead"))
    assert calls[3:] == ["poison"]


def test_a_burst_is_stored_together(server: WebhooksServer) -> None:
    """Each sender is told of its own delivery, and the disk is waited for far less often."""
    server.add_webhook("/x", durable=True)(lambda payload: None)
    url = server.launch(prevent_thread_lock=True, server_port=0)

    async def burst() -> list[httpx.Response]:
        async with httpx.AsyncClient(headers=SECRET, verify=False, timeout=60) as client:
            posts = (
                client.post(
                    f"{url}/webhooks/x", json=dataset_update(), headers={"Webhook-Id": f"d{n % 30}"}
                )
                for n in range(60)
            )
            return await asyncio.gather(*posts)

    answers = [answer.json() for answer in asyncio.run(burst())]
    server.close()
    for n in range(30):
        told = [answer["is_new"] for answer in answers if answer["delivery"] == f"d{n}"]
        assert sorted(told) == [False, True]
