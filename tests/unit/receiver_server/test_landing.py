"""The landing page, and what may take its place."""

import html
import re
from typing import Any

import pytest
from starlette.testclient import TestClient
from starlette.types import Receive, Scope, Send

from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import SECRET
from tests.receiver_payloads import dataset_update


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
    assert "<script" not in page and "http" not in page.replace("http://testserver", "")


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
    assert "choose the content type <code>application/json</code>" in page


def test_each_command_names_the_secret_that_the_handler_asks_for() -> None:
    def commands(server: WebhooksServer) -> list[str]:
        server.add_webhook("/shared")(lambda payload: None)
        server.add_webhook("/own", webhook_secret="another")(lambda payload: None)
        page = html.unescape(TestClient(server.app).get("/").text)
        return re.findall(r"--secret ([^<]+)</pre>", page)

    assert commands(WebhooksServer(webhook_secret="s3cret")) == [
        '"$WEBHOOK_SECRET"',
        "SECRET-OF-THIS-HANDLER",
    ]
    stack = WebhooksServer(webhook_secret="s3cret", secret_in_shell="$(cat tokens.json)")
    assert commands(stack) == ["$(cat tokens.json)", "SECRET-OF-THIS-HANDLER"]


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


@pytest.mark.parametrize("ui", ["/no/such/folder", 42])
def test_a_ui_that_is_none(ui: Any) -> None:
    with pytest.raises(TypeError, match=r"pass an ASGI application or a gradio\.Blocks"):
        WebhooksServer(ui=ui)
