"""Handlers: how they are registered and called, and what becomes of what they answer."""

import asyncio
import threading
from typing import Any

import httpx
import pytest
from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.testclient import TestClient

from receiver.payload import WebhookPayload
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import SECRET
from tests.receiver_payloads import (
    BUCKET_UPDATED,
    NEW,
    PULL_REQUEST_OPENED,
    dataset_update,
)


def test_a_handler_is_reached_under_its_own_name_or_an_explicit_one(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    async def hello(payload: WebhookPayload) -> dict[str, str | None]:
        return {"head": payload.repo.headSha}

    @server.add_webhook("/say/nothing/")
    async def other(payload: WebhookPayload) -> None: ...

    assert list(server.registered_webhooks) == ["/webhooks/hello", "/webhooks/say/nothing"]
    answer = client.post("/webhooks/hello", json=dataset_update())
    assert (answer.status_code, answer.json()) == (200, {"head": NEW})
    answer = client.post("/webhooks/say/nothing", json=dataset_update())
    assert (answer.status_code, answer.json()) == (200, None)
    answer = client.get("/webhooks/hello")
    assert (answer.status_code, answer.json()) == (405, {"error": "Method Not Allowed"})
    assert answer.headers["Allow"] == "POST"
    assert client.post("/webhooks/unknown", json=dataset_update()).status_code == 404


def test_a_path_is_taken_once(server: WebhooksServer) -> None:
    server.add_webhook("/same")(print)
    with pytest.raises(ValueError, match="Webhook /webhooks/same already exists"):
        server.add_webhook("same/")(repr)


def test_parameters_are_found_by_type_and_the_two_well_known_ones_by_name(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    async def untyped(payload, request):  # type: ignore[no-untyped-def]
        return [type(payload).__name__, request.headers["webhook-id"]]

    @server.add_webhook
    async def typed(req: Request, event: WebhookPayload) -> list[str]:
        return [event.event.action, req.state.delivery_id]

    @server.add_webhook
    async def raw(payload: dict[str, Any]) -> list[str]:
        return sorted(payload)

    @server.add_webhook
    async def nothing() -> str:
        return "called"

    def answer(name: str) -> Any:
        headers = {"Webhook-Id": "d1"}
        return client.post(f"/webhooks/{name}", json=BUCKET_UPDATED, headers=headers).json()

    assert answer("untyped") == ["WebhookPayload", "d1"]
    assert answer("typed") == ["update", "d1"]
    assert answer("raw") == ["event", "repo", "updatedFiles", "webhook"]
    assert answer("nothing") == "called"


async def test_a_sync_handler_does_not_block_the_loop(server: WebhooksServer) -> None:
    both_are_here = threading.Barrier(2)

    @server.add_webhook
    def x(payload: WebhookPayload) -> None:
        both_are_here.wait(timeout=10)

    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://receiver", headers=SECRET
    ) as client:
        calls = [client.post("/webhooks/x", json=dataset_update()) for _ in range(2)]
        answers = await asyncio.gather(*calls)
    assert [answer.status_code for answer in answers] == [200, 200]


def test_a_streamed_answer_is_passed_on(server: WebhooksServer, client: TestClient) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    headers = {"Webhook-Id": "d1"}
    for _ in range(2):
        assert client.post("/webhooks/x", json=dataset_update(), headers=headers).text == "ab"


def test_the_documented_payloads_are_taken(server: WebhooksServer, client: TestClient) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> str:
        return payload.event.scope

    author = {"id": "61d2f90c3c2083e1c08af22d"}
    closed = PULL_REQUEST_OPENED | {"event": {"action": "update", "scope": "discussion"}}
    edited = PULL_REQUEST_OPENED | {"event": {"action": "update", "scope": "discussion.comment"}}
    moved = dataset_update(action="move", scope="repo") | {
        "movedTo": {"name": "acme/replies", "owner": author}
    }
    private = dataset_update(scope="repo.config") | {"updatedConfig": {"private": True}}
    files = BUCKET_UPDATED | {"updatedFiles": [{"path": "a.txt", "status": "added"}]}
    for payload in (
        *(PULL_REQUEST_OPENED, closed, edited, moved, private),
        *(BUCKET_UPDATED, files, dataset_update()),
    ):
        answer = client.post("/webhooks/x", json=payload)
        assert (answer.status_code, answer.json()) == (200, payload["event"]["scope"])
