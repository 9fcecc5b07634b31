"""What the management library refuses, and hubs whose answers it cannot read."""

# ruff: noqa: F811  (a fixture that is imported and asked for)

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.types import ASGIApp

from receiver import webhooks
from receiver.errors import WebhookApiError
from tests.receiver_fixtures import serve  # noqa: F401

URL = "http://127.0.0.1:7860/webhooks/retrain"


@pytest.fixture
def at(serve: Callable[[ASGIApp], str]) -> dict[str, str]:
    """A hub whose answers are odd."""
    app = FastAPI()

    @app.api_route("/{path:path}", methods=["GET", "POST"])
    async def answer(path: str) -> dict[str, bool]:
        return {"ok": True}

    return {"endpoint": serve(app), "token": "hub-token"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": URL, "job_id": "j1", "watched": ["user:a"]}, "but not both"),
        ({"watched": ["user:a"]}, "`url` or `job_id`"),
        ({"url": URL, "watched": []}, "something to watch"),
        ({"url": URL, "watched": ["ann"]}, "Expected format 'type:name'"),
        ({"url": URL, "watched": ["dataset:"]}, "Expected format 'type:name'"),
        ({"url": URL, "watched": ["group:acme"]}, "Invalid type 'group'"),
        ({"url": URL, "watched": [{"type": "group", "name": "acme"}]}, "dataset"),
    ],
)
def test_arguments_that_cannot_be(
    at: dict[str, str], arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        webhooks.create_webhook(**arguments, **at)


def test_an_answer_that_is_json_of_something_else(at: dict[str, str]) -> None:
    for call in (webhooks.get_webhook, webhooks.enable_webhook):
        with pytest.raises(WebhookApiError, match="not a webhook"):
            call("odd", **at)
    with pytest.raises(WebhookApiError, match="not a list of webhooks"):
        webhooks.list_webhooks(**at)


def test_a_url_that_is_none() -> None:
    with pytest.raises(WebhookApiError, match="Invalid port"):
        webhooks.list_webhooks(endpoint="http://127.0.0.1:port", token="t")


def test_offline_mode(at: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True)
    with pytest.raises(WebhookApiError, match="HF_HUB_OFFLINE"):
        webhooks.list_webhooks(**at)


def test_a_hub_that_is_down() -> None:
    with pytest.raises(WebhookApiError, match=r"http://127\.0\.0\.1:9 cannot be reached"):
        webhooks.list_webhooks(endpoint="http://127.0.0.1:9", token="t")
