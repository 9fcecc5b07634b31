"""The management library, through the real client, against the documented HTTP interface."""

# ruff: noqa: F811  (a fixture that is imported and asked for)

from collections.abc import Callable
from typing import Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp

from receiver import webhooks
from receiver.errors import NotAllowed, WebhookApiError, WebhookNotFound
from tests.receiver_fixtures import serve  # noqa: F401

URL = "http://127.0.0.1:7860/webhooks/retrain"


def stub_hub() -> FastAPI:
    """`/api/settings/webhooks` as the client expects it; takes every value at its word."""
    app = FastAPI()
    root = "/api/settings/webhooks"
    hooks: dict[str, dict[str, Any]] = {}

    @app.middleware("http")
    async def authorize(request: Request, call_next: Any) -> Any:
        if request.headers.get("authorization") != "Bearer hub-token":
            return JSONResponse({"error": "Invalid credentials"}, status_code=401)
        id = request.url.path.removeprefix(root).strip("/").partition("/")[0]
        if id == "broken":
            return PlainTextResponse("<html>")
        if id == "odd":
            return JSONResponse({"ok": True})
        if id and id not in hooks:
            return JSONResponse({"error": "Not found"}, status_code=404)
        return await call_next(request)

    @app.get(root)
    async def ls() -> list[dict[str, Any]]:
        return list(hooks.values())

    @app.get(root + "/{id}")
    async def info(id: str) -> dict[str, Any]:
        return {"webhook": hooks[id]}

    @app.post(root)
    async def create(body: dict[str, Any]) -> Any:
        if body.get("url") == "http://169.254.169.254/":
            return JSONResponse({"error": "metadata addresses are never called"}, status_code=422)
        job = (
            {"docker_image": "python", "id": body["jobSourceId"]} if "jobSourceId" in body else None
        )
        kept = {
            name: body[name] for name in ("url", "watched", "domains", "secret") if name in body
        }
        id = f"hook{len(hooks)}"
        hooks[id] = {"id": id, "disabled": False, **kept, **({"job": job} if job else {})}
        return {"webhook": hooks[id]}

    @app.post(root + "/{id}")
    async def update(id: str, body: dict[str, Any]) -> dict[str, Any]:
        hooks[id].update(body)
        return {"webhook": hooks[id]}

    @app.post(root + "/{id}/{verb}")
    async def switch(id: str, verb: str) -> dict[str, Any]:
        hooks[id].pop("status", None)
        hooks[id]["disabled"] = verb == "disable"
        return {"webhook": hooks[id]}

    @app.delete(root + "/{id}")
    async def delete(id: str) -> None:
        del hooks[id]

    app.state.hooks = hooks
    return app


@pytest.fixture
def hub() -> FastAPI:
    return stub_hub()


@pytest.fixture
def at(hub: FastAPI, serve: Callable[[ASGIApp], str]) -> dict[str, str]:
    return {"endpoint": serve(hub), "token": "hub-token"}


def test_a_suspension_is_told_apart_from_a_disabled_webhook(
    hub: FastAPI, at: dict[str, str]
) -> None:
    made = webhooks.create_webhook(url=URL, watched=["user:ann"], **at)
    hub.state.hooks[made.id].update(status="suspended", disabled=True)
    assert webhooks.list_webhooks(**at)[0].status == "suspended"
    assert webhooks.enable_webhook(made.id, **at).status == "enabled"


def test_a_webhook_that_starts_a_job(at: dict[str, str]) -> None:
    made = webhooks.create_webhook(
        job_id="j000001", watched=["user:ann"], secrets={"HF_TOKEN": "hf_x"}, **at
    )
    assert made.url is None
    assert made.job == {"docker_image": "python", "id": "j000001"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"url": URL, "job_id": "j1", "watched": ["user:a"]}, "but not both"),
        ({"watched": ["user:a"]}, "`url` or `job_id`"),
        ({"url": URL, "watched": []}, "something to watch"),
        ({"url": URL, "watched": ["user:a"], "secrets": {"A": "b"}}, "together with `job_id`"),
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


def test_an_unknown_webhook(at: dict[str, str]) -> None:
    for call in (
        webhooks.get_webhook,
        webhooks.update_webhook,
        webhooks.enable_webhook,
        webhooks.disable_webhook,
        webhooks.delete_webhook,
    ):
        with pytest.raises(WebhookNotFound, match="'nothing'"):
            call("nothing", **at)


def test_a_wrong_token(at: dict[str, str]) -> None:
    with pytest.raises(NotAllowed, match=r"401: Invalid credentials.*HF_TOKEN"):
        webhooks.list_webhooks(endpoint=at["endpoint"], token="wrong")


def test_what_the_hub_refuses_is_passed_on(at: dict[str, str]) -> None:
    with pytest.raises(WebhookApiError, match="422: metadata addresses"):
        webhooks.create_webhook(url="http://169.254.169.254/", watched=["user:a"], **at)


def test_an_answer_that_is_none(at: dict[str, str]) -> None:
    with pytest.raises(WebhookApiError, match="not JSON"):
        webhooks.get_webhook("broken", **at)


def test_an_answer_that_is_json_of_something_else(at: dict[str, str]) -> None:
    for call in (webhooks.get_webhook, webhooks.enable_webhook):
        with pytest.raises(WebhookApiError, match="not a webhook"):
            call("odd", **at)
    with pytest.raises(WebhookApiError, match="not a list of webhooks"):
        webhooks.list_webhooks(endpoint=f"{at['endpoint']}/odd", token="hub-token")


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
