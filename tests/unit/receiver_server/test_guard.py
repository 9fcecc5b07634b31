"""The request guard: what it asks of a delivery before the handler is called."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.testclient import TestClient
from starlette.types import Receive

from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer
from tests.receiver_payloads import (
    SIGNING_SECRET,
    body_of,
    dataset_update,
    standard_headers,
)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b'{"event": {"action": "update", "scope": "repo"}}',
        body_of(dataset_update() | {"event": {"action": 7, "scope": "repo"}}),
    ],
)
def test_a_body_that_is_no_payload(server: WebhooksServer, client: TestClient, body: bytes) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> None: ...

    answer = client.post("/webhooks/x", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("The body is not ")
    assert len(answer.content) < 2000, "the body is not echoed"


def test_what_only_a_newer_hub_says_reaches_the_handler(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> list[str]:
        return [payload.event.action, payload.event.scope, payload.repo.type]

    payload = dataset_update(action="archive", scope="space.log", type="collection")
    assert client.post("/webhooks/x", json=payload).json() == ["archive", "space.log", "collection"]


@pytest.mark.parametrize(
    ("query", "header", "status"),
    [
        ("?secret=s3cret", None, 200),
        ("?secret=wrong", None, 403),
        ("?secret=", None, 403),
        ("?other=s3cret", None, 401),
        ("?secret=s3cret", "wrong", 403),
        ("?secret=wrong", "s3cret", 200),
    ],
)
def test_the_secret_may_stand_in_the_url(query: str, header: str | None, status: int) -> None:
    server = WebhooksServer(webhook_secret="s3cret")

    @server.add_webhook
    async def x(payload: WebhookPayload) -> str:
        return payload.repo.name

    headers = {} if header is None else {"X-Webhook-Secret": header}
    answer = TestClient(server.app).post(
        f"/webhooks/x{query}", json=dataset_update(), headers=headers
    )
    assert answer.status_code == status


def test_a_body_without_a_content_type_is_json(server: WebhooksServer, client: TestClient) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> str:
        return payload.repo.name

    for content_type in ("application/x-www-form-urlencoded", "text/plain", ""):
        headers = {"Content-Type": content_type}
        answer = client.post("/webhooks/x", content=body_of(dataset_update()), headers=headers)
        assert answer.json() == "acme/answers"


@pytest.mark.parametrize("announced", [True, False])
def test_a_large_body_is_refused(announced: bool) -> None:
    server = WebhooksServer(settings=ReceiverSettings(max_body_bytes=1024))

    @server.add_webhook
    async def x(payload: dict[str, str]) -> int:
        return len(payload["a"])

    with TestClient(server.app) as client:
        fits, large = b'{"a": "%s"}' % (b"x" * 1015), b'{"a": "%s"}' % (b"x" * 1016)
        assert len(fits) == 1024

        def post(body: bytes) -> int:
            content = body if announced else iter([body[:700], body[700:]])
            return client.post("/webhooks/x", content=content).status_code

        assert post(fits) == 200
        assert post(large) == 413


def test_a_body_that_never_arrives_is_given_up() -> None:
    server = WebhooksServer(settings=ReceiverSettings(body_timeout_seconds=0.05))
    server.add_webhook("/x")(lambda payload: None)

    async def receive() -> Any:
        await asyncio.sleep(60)

    assert asyncio.run(answer_of(server, {}, receive))[0] == 408


@pytest.mark.parametrize(
    ("proof", "headers", "status", "error"),
    [
        ("secret", {}, 401, "x-webhook-secret header not set."),
        ("secret", {"x-webhook-secret": "wrong"}, 403, "Invalid webhook secret."),
        ("gitlab", {"x-gitlab-token": "wrong"}, 403, ""),
        ("gitlab", {}, 401, ""),
        ("github", {}, 401, ""),
        ("gitea", {}, 401, ""),
        ("standard-webhooks", {"webhook-id": "1", "webhook-timestamp": "1"}, 401, ""),
    ],
)
def test_a_stranger_cannot_have_a_body_read(
    proof: ProofScheme, headers: dict[str, str], status: int, error: str
) -> None:
    server = WebhooksServer(webhook_secret="s3cret", settings=ReceiverSettings(proof=proof))
    server.add_webhook("/x")(lambda payload: None)

    async def receive() -> Any:
        raise AssertionError("the body is read")

    found, body = asyncio.run(answer_of(server, headers, receive))
    assert found == status
    assert error in json.loads(body)["error"]


async def answer_of(
    server: WebhooksServer, headers: dict[str, str], receive: Receive
) -> tuple[int, bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/webhooks/x",
        "raw_path": b"/webhooks/x",
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await server.app(scope, receive, send)
    return sent[0]["status"], sent[1]["body"]


def test_each_handler_may_have_its_own_secret_and_proof(
    server: WebhooksServer, client: TestClient
) -> None:
    server.add_webhook("/own", webhook_secret="another")(lambda payload: "own")
    server.add_webhook("/signed", webhook_secret=SIGNING_SECRET, proof="standard-webhooks")(
        lambda payload: "signed"
    )
    body = body_of(dataset_update())
    assert client.post("/webhooks/own", content=body).status_code == 403
    own = {"X-Webhook-Secret": "another"}
    assert client.post("/webhooks/own", content=body, headers=own).json() == "own"
    assert client.post("/webhooks/signed", content=body).status_code == 401
    signed = standard_headers(body)
    assert client.post("/webhooks/signed", content=body, headers=signed).json() == "signed"


def test_secrets_come_from_the_environment_or_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def status(server: WebhooksServer, secret: str) -> int:
        server.add_webhook("/x")(lambda payload: None)
        headers = {"X-Webhook-Secret": secret}
        client = TestClient(server.app)
        return client.post("/webhooks/x", json=dataset_update(), headers=headers).status_code

    assert status(WebhooksServer(), "anything") == 200
    monkeypatch.setenv("WEBHOOK_SECRET", "of-env")
    assert status(WebhooksServer(), "of-env") == 200
    assert status(WebhooksServer(), "other") == 403
    assert status(WebhooksServer(webhook_secret="argument"), "of-env") == 403
    assert status(WebhooksServer(webhook_secret=["argument", "of-env"]), "of-env") == 200
    monkeypatch.setenv("WEBHOOK_SECRET", "")
    assert status(WebhooksServer(), "anything") == 200


def test_there_is_no_way_around_the_guard_by_the_path(
    server: WebhooksServer, client: TestClient
) -> None:
    server.add_webhook("/x")(lambda payload: "in")
    outer = FastAPI()
    outer.mount("/hooks", server.app)
    for app, path in (
        (server.app, "/webhooks/x"),
        (server.app, "/webhooks/x/"),
        (server.app, "//webhooks/x"),
        (server.app, "/webhooks/%78"),
        (outer, "/hooks/webhooks/x"),
        (outer, "/hooks/webhooks/x/"),
    ):
        with TestClient(app) as stranger:
            answer = stranger.post(path, json=dataset_update())
            assert answer.status_code in (401, 404), path
