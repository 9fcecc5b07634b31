"""A delivery that comes again has one effect, and the first one's answer."""

import asyncio

import httpx
from starlette.testclient import TestClient

from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import SECRET
from tests.receiver_payloads import dataset_update


def test_a_delivery_that_is_repeated_gets_the_first_answer(
    server: WebhooksServer, client: TestClient
) -> None:
    calls: list[int] = []

    @server.add_webhook
    async def x(payload: WebhookPayload) -> int:
        calls.append(1)
        return len(calls)

    server.add_webhook("/y")(x)

    def post(delivery_id: str | None, path: str = "/webhooks/x") -> int:
        headers = {} if delivery_id is None else {"Webhook-Id": delivery_id}
        answer: int = client.post(path, json=dataset_update(), headers=headers).json()
        return answer

    assert [post("d1"), post("d1"), post("d2"), post("d1")] == [1, 1, 2, 1]
    assert post("d1", "/webhooks/y") == 3, "ids are remembered for each handler"
    assert [post(None), post(None)] == [4, 5], "without an id nothing tells two deliveries apart"


def test_a_repeated_delivery_still_needs_the_proof(
    server: WebhooksServer, client: TestClient
) -> None:
    server.add_webhook("/x")(lambda payload: "private")
    headers = {"Webhook-Id": "d1"}
    assert client.post("/webhooks/x", json=dataset_update(), headers=headers).status_code == 200
    wrong = headers | {"X-Webhook-Secret": "wrong"}
    assert client.post("/webhooks/x", json=dataset_update(), headers=wrong).status_code == 403


def test_a_failed_delivery_is_handled_anew(server: WebhooksServer, client: TestClient) -> None:
    outcomes = iter([RuntimeError("the password is hunter2"), "done"])

    @server.add_webhook
    async def x(payload: WebhookPayload) -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    headers = {"Webhook-Id": "d1"}
    answers = [client.post("/webhooks/x", json=dataset_update(), headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [500, 200, 200]
    assert answers[0].json() == {"error": "The handler failed; the log says why."}


async def test_concurrent_attempts_of_one_delivery_are_one_call(server: WebhooksServer) -> None:
    calls = []

    @server.add_webhook
    async def x(payload: WebhookPayload) -> int:
        calls.append(1)
        await asyncio.sleep(0.05)
        return len(calls)

    headers = SECRET | {"Webhook-Id": "d1"}
    transport = httpx.ASGITransport(server.app)
    async with httpx.AsyncClient(
        transport=transport, base_url="http://receiver", headers=headers
    ) as client:
        posts = [client.post("/webhooks/x", json=dataset_update()) for _ in range(8)]
        answers = await asyncio.gather(*posts)
    assert [answer.json() for answer in answers] == [1] * 8
    assert calls == [1]


def test_only_so_many_answers_are_remembered() -> None:
    server = WebhooksServer(settings=ReceiverSettings(remembered_deliveries=2))
    calls: list[str] = []
    server.add_webhook("/x")(lambda payload, request: calls.append(request.headers["webhook-id"]))
    with TestClient(server.app) as client:
        for delivery_id in ("1", "2", "3", "3", "2", "1"):
            headers = {"Webhook-Id": delivery_id}
            client.post("/webhooks/x", json=dataset_update(), headers=headers)
    assert calls == ["1", "2", "3", "1"]
