"""The landing page, and what may take its place."""

from pathlib import Path
from typing import Any

import pytest
from fastapi import HTTPException
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from receiver.server import WebhookPayload, WebhooksServer
from receiver.settings import ReceiverSettings
from tests.receiver_fixtures import SECRET
from tests.receiver_payloads import (
    dataset_update,
)


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
    folder = tmp_path / "ui"
    folder.mkdir()
    (folder / "index.html").write_text("<h1>mine</h1>")
    (folder / "style.css").write_text("h1 { color: teal }")
    (tmp_path / "not-mine.txt").write_text("beside it")
    for ui in (folder, str(folder)):
        server = WebhooksServer(ui=ui, webhook_secret="s3cret")
        server.add_webhook("/x")(lambda payload: "called")
        with TestClient(server.app) as client:
            assert client.get("/").text == "<h1>mine</h1>"
            assert client.get("/style.css").headers["content-type"].startswith("text/css")
            assert client.get("/%2e%2e/not-mine.txt").status_code == 404
            assert client.post("/webhooks/x", json=dataset_update()).status_code == 401
            assert client.post("/webhooks/x", json=dataset_update(), headers=SECRET).is_success


@pytest.mark.parametrize(
    ("ui", "error", "reason"),
    [
        ("/no/such/folder", ValueError, "'/no/such/folder' is not a folder"),
        (__file__, ValueError, "is not a folder"),
        (42, TypeError, "ui is a int: pass an ASGI application"),
    ],
)
def test_a_ui_that_is_none(ui: Any, error: type[Exception], reason: str) -> None:
    with pytest.raises(error, match=reason):
        WebhooksServer(ui=ui)
