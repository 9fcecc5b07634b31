"""Where a server listens, whom it refuses to be open to, and how it stops."""

import asyncio
import socket
import threading
from collections.abc import Callable

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from receiver import listen
from receiver.errors import AddressUnavailable, OpenToEveryone
from receiver.listen import bind
from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer, measure
from tests.jobs_fixtures import until
from tests.receiver_fixtures import SECRET
from tests.receiver_payloads import dataset_update


def test_a_server_with_an_open_handler_stays_on_this_machine() -> None:
    server = WebhooksServer()
    server.add_webhook("/closed", webhook_secret="x")(lambda payload: None)
    server.add_webhook("/open")(lambda payload: None)
    for host in ("0.0.0.0", ""):
        with pytest.raises(OpenToEveryone, match=r"/webhooks/open.*WEBHOOK_SECRET"):
            server.launch(server_name=host, server_port=0)


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
    assert "every program on this machine can call them: /webhooks/x" in printed
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


@pytest.mark.parametrize(
    ("headers", "status", "said"),
    [
        ({}, 200, ""),
        ({"Host": "localhost:7860"}, 200, ""),
        ({"Host": "hooks.example"}, 404, ""),
        ({"Host": "evil.example:7860"}, 403, "public_url"),
        ({"Host": "localhost:7860", "Origin": "http://localhost:7860"}, 200, ""),
        ({"Host": "localhost:7860", "Origin": "http://localhost:8080"}, 403, "WEBHOOK_SECRET"),
        ({"Origin": "https://evil.example"}, 403, "WEBHOOK_SECRET"),
        ({"Origin": "null"}, 403, "WEBHOOK_SECRET"),
        ({"Sec-Fetch-Site": "cross-site"}, 403, "WEBHOOK_SECRET"),
        ({"Sec-Fetch-Site": "same-site"}, 403, "WEBHOOK_SECRET"),
        ({"Sec-Fetch-Site": "same-origin"}, 200, ""),
    ],
)
def test_without_a_secret_pages_of_other_sites_reach_no_handler(
    serve: Callable[[ASGIApp], str], headers: dict[str, str], status: int, said: str
) -> None:
    server = WebhooksServer(settings=ReceiverSettings(public_url="https://hooks.example"))
    server.add_webhook("/open")(lambda payload: "called")
    server.add_webhook("/proven", webhook_secret="s3cret")(lambda payload: "called")
    url = serve(server.app)
    answer = httpx.post(f"{url}/webhooks/open", json=dataset_update(), headers=headers)
    assert (answer.status_code, said in answer.text) == (status, True)
    proven = httpx.post(f"{url}/webhooks/proven", json=dataset_update(), headers=headers | SECRET)
    assert proven.status_code == 200, "the secret is proof enough"


PATHS = ("/", "/health", "/docs", "/openapi.json", "/metrics")


def measured(public_url: str) -> WebhooksServer:
    settings = ReceiverSettings(public_url=public_url)
    server = WebhooksServer(webhook_secret="s3cret", settings=settings)
    server.add_webhook("/proven")(lambda payload: "called")
    measure(server)
    return server


def test_a_page_that_leads_its_own_name_here_reads_nothing(
    serve: Callable[[ASGIApp], str],
) -> None:
    server = measured("https://hooks.example")
    outer = FastAPI(lifespan=server.lifespan)
    outer.mount("/inner", server.app)
    for url in (serve(server.app), f"{serve(outer)}/inner"):
        for path in PATHS:
            foreign = httpx.get(f"{url}{path}", headers={"Host": "evil.example:7860"})
            assert (foreign.status_code, "public_url" in foreign.text) == (403, True), path
            own = httpx.get(f"{url}{path}", headers={"Host": "localhost:7860"})
            assert own.status_code == 200, path
        headers = SECRET | {"Host": "evil.example"}
        proven = httpx.post(f"{url}/webhooks/proven", json=dataset_update(), headers=headers)
        assert proven.json() == "called", "the secret is proof enough"


def test_who_uses_the_public_name_reaches_the_handlers_only(
    serve: Callable[[ASGIApp], str],
) -> None:
    server = measured("https://Hooks.example:8443/here")
    outer = FastAPI(lifespan=server.lifespan)
    outer.mount("/inner", server.app)
    for url in (serve(server.app), f"{serve(outer)}/inner"):
        for host in ("hooks.example:8443", "hooks.example", "HOOKS.example."):
            with httpx.Client(base_url=url, headers=SECRET | {"Host": host}) as stranger:
                for path in (*PATHS, "/webhooks/proven", "/webhooks/no-such"):
                    shown = stranger.get(path)
                    assert (shown.status_code, shown.json()) == (404, {"error": "Not Found"}), path
                called = stranger.post("/webhooks/proven", json=dataset_update())
                assert called.json() == "called"


def test_the_page_stays_where_the_public_name_is_of_this_machine_or_of_a_space(
    serve: Callable[[ASGIApp], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_home = serve(measured("http://localhost:7860").app)
    assert httpx.get(at_home, headers={"Host": "localhost:7860"}).status_code == 200
    shown = {"Host": "ada-hooks.hf.space"}
    elsewhere = serve(measured("https://ada-hooks.hf.space").app)
    assert httpx.get(elsewhere, headers=shown).status_code == 404
    monkeypatch.setenv("SPACE_ID", "ada/hooks")
    in_space = serve(measured("https://ada-hooks.hf.space").app)
    assert httpx.get(in_space, headers=shown).status_code == 200
