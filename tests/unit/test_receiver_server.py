"""Routes and their doors, through the application, without a socket."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import StreamingResponse
from pydantic import ValidationError
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from receiver import listen
from receiver.errors import AddressUnavailable, OpenToEveryone
from receiver.listen import bind
from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings
from tests.jobs_fixtures import until
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401
from tests.receiver_payloads import (
    BUCKET_UPDATED,
    GITHUB_PUSH,
    NEW,
    PULL_REQUEST_OPENED,
    SIGNING_SECRET,
    body_of,
    dataset_update,
    hmac_hex,
    standard_headers,
)

SECRET = {"X-Webhook-Secret": "s3cret"}


@pytest.fixture
def server() -> WebhooksServer:
    return WebhooksServer(webhook_secret="s3cret")


@pytest.fixture
def client(server: WebhooksServer) -> Iterator[TestClient]:
    with TestClient(server.app, headers=SECRET, raise_server_exceptions=False) as client:
        yield client


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


def test_a_decorated_function_stays_callable(server: WebhooksServer) -> None:
    @server.add_webhook
    def double(payload: int) -> int:
        return payload * 2

    assert double(21) == 42


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


def test_the_proof_comes_before_the_body(server: WebhooksServer, client: TestClient) -> None:
    calls = []
    server.add_webhook("/x")(lambda payload: calls.append(payload))
    for body in (b"", b"{", b"\xff", body_of(dataset_update())):
        for headers, status, error in (
            ({}, 401, "x-webhook-secret header not set."),
            ({"X-Webhook-Secret": "wrong"}, 403, "Invalid webhook secret."),
        ):
            answer = httpx_post(server, body, headers)
            assert (answer.status_code, answer.json()) == (status, {"error": error})
    assert calls == []


def httpx_post(server: WebhooksServer, body: bytes, headers: dict[str, str]) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://receiver") as client:
            return await client.post("/webhooks/x", content=body, headers=headers)

    return asyncio.run(post())


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b"\xff\xfe",
        b"[" * 50_000,
        b'{"event": {"action": "update", "scope": "repo"}}',
        body_of(dataset_update(action="explode")),
        body_of(dataset_update() | {"webhook": {"id": "w", "version": 2}}),
    ],
)
def test_a_body_that_is_no_payload(server: WebhooksServer, client: TestClient, body: bytes) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> None: ...

    answer = client.post("/webhooks/x", content=body)
    assert answer.status_code == 422
    assert answer.json()["error"].startswith("Not the payload this handler takes: body")
    assert len(answer.content) < 2000, "the body is not echoed"


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
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/webhooks/x",
        "raw_path": b"/webhooks/x",
        "query_string": b"",
        "headers": [],
    }
    asyncio.run(server.app(scope, receive, send))
    assert sent[0]["status"] == 408


def test_a_sync_handler_does_not_block_the_loop(server: WebhooksServer) -> None:
    both_are_here = threading.Barrier(2)

    @server.add_webhook
    def x(payload: WebhookPayload) -> None:
        both_are_here.wait(timeout=10)

    async def two_at_once() -> list[int]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://receiver", headers=SECRET
        ) as client:
            calls = [client.post("/webhooks/x", json=dataset_update()) for _ in range(2)]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert asyncio.run(two_at_once()) == [200, 200]


def test_a_failing_handler_is_a_500_that_says_nothing_of_the_inside(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> None:
        raise RuntimeError("the database password is hunter2")

    answer = client.post("/webhooks/x", json=dataset_update())
    assert answer.status_code == 500
    assert answer.json() == {"error": "The handler failed; the log says why."}


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
    outcomes = iter([RuntimeError(), "done"])

    @server.add_webhook
    async def x(payload: WebhookPayload) -> str:
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    headers = {"Webhook-Id": "d1"}
    statuses = [
        client.post("/webhooks/x", json=dataset_update(), headers=headers).status_code
        for _ in range(3)
    ]
    assert statuses == [500, 200, 200]


def test_concurrent_attempts_of_one_delivery_are_one_call(server: WebhooksServer) -> None:
    calls = []

    @server.add_webhook
    async def x(payload: WebhookPayload) -> int:
        calls.append(1)
        await asyncio.sleep(0.05)
        return len(calls)

    async def race() -> list[int]:
        transport = httpx.ASGITransport(server.app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://receiver", headers=SECRET
        ) as client:
            headers = {"Webhook-Id": "d1"}
            posts = [
                client.post("/webhooks/x", json=dataset_update(), headers=headers) for _ in range(8)
            ]
            return [answer.json() for answer in await asyncio.gather(*posts)]

    assert asyncio.run(race()) == [1] * 8
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


def test_a_streamed_answer_is_passed_on(server: WebhooksServer, client: TestClient) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> StreamingResponse:
        return StreamingResponse(iter(["a", "b"]))

    headers = {"Webhook-Id": "d1"}
    for _ in range(2):
        assert client.post("/webhooks/x", json=dataset_update(), headers=headers).text == "ab"


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


def test_a_github_push_reaches_the_handler_as_the_hubs_payload(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook(proof="github")
    async def x(payload: WebhookPayload, request: Request) -> list[str]:
        assert payload.updatedRefs is not None
        return [payload.repo.name, payload.updatedRefs[0].ref, request.state.delivery_id]

    def post(payload: Any, event: str) -> httpx.Response:
        body = body_of(payload)
        headers = {
            "X-Hub-Signature-256": "sha256=" + hmac_hex("s3cret", body),
            "X-GitHub-Event": event,
            "X-GitHub-Delivery": f"72d3162e-{event}",
        }
        return client.post("/webhooks/x", content=body, headers=headers)  # type: ignore[return-value]

    answer = post(GITHUB_PUSH, "push")
    assert answer.json() == ["Codertocat/Hello-World", "refs/heads/main", "72d3162e-push"]
    assert post({"zen": "Speak like a human."}, "ping").json() == {"pong": True}
    assert post({}, "issues").json() == {"ignored": "the github event 'issues' is no push"}
    answer = post({"ref": "refs/heads/main"}, "push")
    assert answer.status_code == 422
    assert answer.json() == {"error": "not a github push event: before: Field required"}


def test_secrets_come_from_the_environment_or_the_argument(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def status(server: WebhooksServer, secret: str) -> int:
        server.add_webhook("/x")(lambda payload: None)
        return httpx_post(
            server, body_of(dataset_update()), {"X-Webhook-Secret": secret}
        ).status_code

    assert status(WebhooksServer(), "anything") == 200
    monkeypatch.setenv("WEBHOOK_SECRET", "of-env")
    assert status(WebhooksServer(), "of-env") == 200
    assert status(WebhooksServer(), "other") == 403
    assert status(WebhooksServer(webhook_secret="argument"), "of-env") == 403
    assert status(WebhooksServer(webhook_secret=["argument", "of-env"]), "of-env") == 200
    monkeypatch.setenv("WEBHOOK_SECRET", "")
    assert status(WebhooksServer(), "anything") == 200


def test_the_landing_page_says_what_is_registered_and_how_to_call_it(
    server: WebhooksServer, client: TestClient
) -> None:
    server.add_webhook("/first")(lambda payload: None)
    server.add_webhook("/<b>")(lambda payload: None)
    page = client.get("/").text
    assert "2 webhooks registered" in page
    assert (
        "<pre>pipeline webhooks create \\\n"
        "  --url http://testserver/webhooks/first \\\n"
        "  --watch dataset:OWNER/NAME --domain repo \\\n"
        "  --secret &#34;$WEBHOOK_SECRET&#34;</pre>" in page
    )
    assert "Secret: set" in page
    assert "s3cret" not in page
    assert "<b>" not in page, "names are escaped"
    assert 'name="viewport"' in page


def test_the_landing_page_warns_of_an_open_handler_and_shows_the_public_url() -> None:
    settings = ReceiverSettings(public_url="https://hooks.example/")
    server = WebhooksServer(settings=settings)
    server.add_webhook("/first")(lambda payload: None)
    server.add_webhook("/second", webhook_secret="x", proof="gitea")(lambda payload: None)
    with TestClient(server.app) as client:
        page = client.get("/").text
    assert "Secret: not set" in page
    assert "--url https://hooks.example/webhooks/first " in page
    assert "a valid Gitea signature" in page


def test_the_landing_page_lists_the_latest_deliveries(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    async def x(payload: WebhookPayload) -> None:
        if payload.repo.name == "acme/broken":
            raise RuntimeError

    assert "Latest deliveries" not in client.get("/").text
    for number in range(30):
        client.post("/webhooks/x", json=dataset_update(), headers={"Webhook-Id": f"d{number}"})
    client.post("/webhooks/x", json=dataset_update(name="acme/broken"))
    client.post("/webhooks/x", json={}, headers={"Webhook-Id": "<i>"})
    page = client.get("/").text
    assert page.count("<li>") == 20
    assert page.index("&lt;i&gt;") < page.index("<code>d29</code>"), "newest first"
    for status in (200, 422, 500):
        assert f"answered <strong>{status}</strong>" in page
    assert "acme" not in page, "who may see the page may not see what was delivered"


def test_the_landing_page_shows_what_a_handler_itself_answered(
    server: WebhooksServer, client: TestClient
) -> None:
    @server.add_webhook
    def x(payload: WebhookPayload) -> None:
        raise HTTPException(409, "Not now.")

    assert client.post("/webhooks/x", json=dataset_update()).status_code == 409
    assert "answered <strong>409</strong>" in client.get("/").text


def test_a_signature_of_svix_is_repeated_under_the_id_that_it_covers() -> None:
    server = WebhooksServer(webhook_secret=SIGNING_SECRET)
    calls = []
    server.add_webhook("/x", proof="standard-webhooks")(lambda payload: calls.append(payload))
    body = body_of(dataset_update())
    headers = {
        name.replace("webhook-", "svix-"): value for name, value in standard_headers(body).items()
    }
    with TestClient(server.app) as client:
        for unsigned in ("1", "2"):
            sent = headers | {"Webhook-Id": unsigned}
            assert client.post("/webhooks/x", content=body, headers=sent).status_code == 200
    assert len(calls) == 1


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32-be"])
def test_json_is_utf_8(tmp_path: Path, durable: bool, encoding: str) -> None:
    settings = ReceiverSettings(deliveries_path=tmp_path / "receiver.db")
    server = WebhooksServer(webhook_secret="s3cret", settings=settings)
    server.add_webhook("/x", durable=durable)(lambda payload: None)
    body = json.dumps(dataset_update()).encode(encoding)
    with TestClient(server.app, headers=SECRET) as client:
        assert client.post("/webhooks/x", content=body).status_code == 422


def test_a_ui_of_ones_own_takes_the_place_of_the_landing_page() -> None:
    async def ui(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"mine " + scope["path"].encode()})

    server = WebhooksServer(ui=ui, webhook_secret="s3cret")
    server.add_webhook("/x")(lambda payload: "called")
    with TestClient(server.app) as client:
        assert client.get("/").text == "mine /"
        assert client.get("/deep/page").text == "mine /deep/page"
        assert client.post("/webhooks/x", json=dataset_update()).status_code == 401
        answer = client.post("/webhooks/x", json=dataset_update(), headers=SECRET)
        assert answer.json() == "called"


def test_a_folder_takes_the_place_of_the_landing_page(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    (tmp_path / "style.css").write_text("h1 { color: teal }")
    for ui in (tmp_path, str(tmp_path)):
        server = WebhooksServer(ui=ui, webhook_secret="s3cret")
        server.add_webhook("/x")(lambda payload: "called")
        with TestClient(server.app) as client:
            assert client.get("/").text == "<h1>mine</h1>"
            assert client.get("/style.css").headers["content-type"].startswith("text/css")
            assert client.get("/../test_receiver_server.py").status_code == 404
            assert client.post("/webhooks/x", json=dataset_update()).status_code == 401
            assert client.post("/webhooks/x", json=dataset_update(), headers=SECRET).is_success


@pytest.mark.parametrize(
    ("ui", "error", "reason"),
    [
        ("/no/such/folder", ValueError, "'/no/such/folder' is no folder"),
        (__file__, ValueError, "is no folder"),
        (42, TypeError, "ui is a int: give an ASGI application"),
    ],
)
def test_a_ui_that_is_none(ui: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        WebhooksServer(ui=ui)


def test_there_is_no_way_around_the_door_by_the_path(
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


def test_every_route_is_in_openapi_and_health_answers(
    server: WebhooksServer, client: TestClient
) -> None:
    server.add_webhook("/x")(lambda payload: None)
    described = client.get("/openapi.json").json()["paths"]["/webhooks/x"]["post"]
    assert set(described["responses"]) >= {"200", "401", "403", "408", "413", "422"}
    assert "WebhookPayload" in str(described["requestBody"])
    assert client.get("/health").json() == {"status": "ok"}


def test_a_server_without_a_secret_stays_on_this_machine() -> None:
    server = WebhooksServer()
    server.add_webhook("/x")(lambda payload: None)
    for host in ("0.0.0.0", ""):
        with pytest.raises(OpenToEveryone, match="WEBHOOK_SECRET"):
            server.launch(server_name=host, server_port=0)


def test_one_open_handler_is_enough_to_refuse() -> None:
    server = WebhooksServer()
    server.add_webhook("/closed", webhook_secret="x")(lambda payload: None)
    server.add_webhook("/open")(lambda payload: None)
    with pytest.raises(OpenToEveryone, match="/webhooks/open"):
        server.launch(server_name="0.0.0.0", server_port=0)


def test_a_server_that_is_reachable_takes_no_open_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nothing of the tests is to be reached from outside.
    monkeypatch.setattr(listen, "bind", lambda _host, port: bind("127.0.0.1", port))
    server = WebhooksServer()
    server.add_webhook("/closed", webhook_secret="x")(lambda payload: None)
    server.launch(prevent_thread_lock=True, server_name="0.0.0.0", server_port=0)
    try:
        with pytest.raises(OpenToEveryone, match="/webhooks/open"):
            server.add_webhook("/open")(lambda payload: None)
        assert list(server.registered_webhooks) == ["/webhooks/closed"]
        server.add_webhook("/too", webhook_secret="y")(lambda payload: None)
    finally:
        server.close()
    server.add_webhook("/open")(lambda payload: None)


def test_an_address_that_cannot_be_taken() -> None:
    server = WebhooksServer(webhook_secret="x")
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=rf"Port {port} on 127\.0\.0\.1 is in use"):
            server.launch(server_port=port)
    with pytest.raises(AddressUnavailable, match=r"203\.0\.113\.9"):
        server.launch(server_name="203.0.113.9", server_port=0)


def test_launch_from_a_running_loop_returns_and_moves_when_repeated(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = WebhooksServer()
    server.add_webhook("/x")(lambda payload: "called")

    async def cell() -> str:
        return server.launch(server_port=0)

    first = asyncio.run(cell())
    printed = capsys.readouterr().out
    assert f"  - POST {first}/webhooks/x" in printed
    assert "open to everyone: /webhooks/x" in printed
    assert httpx.post(f"{first}/webhooks/x", json=dataset_update()).json() == "called"

    server.add_webhook("/later")(lambda payload: "later")
    assert httpx.post(f"{first}/webhooks/later", json=dataset_update()).json() == "later"

    second = server.launch(prevent_thread_lock=True, server_port=0)
    assert httpx.post(f"{second}/webhooks/x", json=dataset_update()).json() == "called"
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{first}/webhooks/x")
    server.close()
    server.close()
    with pytest.raises(httpx.ConnectError):
        httpx.post(f"{second}/webhooks/x")


def takes_no_more(url: str) -> bool:
    address = httpx.URL(url)
    try:
        socket.create_connection((address.host, address.port or 80)).close()
    except ConnectionError:
        return True
    return False


def test_a_stopping_server_lets_handlers_finish() -> None:
    server = WebhooksServer()
    began, ended = threading.Event(), threading.Event()

    @server.add_webhook
    def x(payload: WebhookPayload) -> str:
        began.set()
        until(lambda: takes_no_more(url))
        ended.set()
        return "finished"

    url = server.launch(prevent_thread_lock=True, server_port=0)
    answers: list[str] = []
    caller = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{url}/webhooks/x", json=dataset_update()).json())
    )
    caller.start()
    assert began.wait(10)
    server.close()
    assert ended.is_set()
    caller.join()
    assert answers == ["finished"]


@pytest.mark.parametrize("wrong", [{"port": 70000}, {"prot": 1}, {"public_url": "hooks.example"}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ReceiverSettings.model_validate(wrong)
