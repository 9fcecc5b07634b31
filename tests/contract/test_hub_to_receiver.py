"""The hub's deliveries at the receiver's door: each kind of secret, each proof, and the ping."""

import logging
from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
from starlette.types import ASGIApp

from receiver.payload import WebhookPayload
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer
from tests.hub_fixtures import RunningHub, push_file, wait_until
from tests.receiver_fixtures import no_secret_in_the_environment, serve

__all__ = ["no_secret_in_the_environment", "serve"]

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "dataset", "name": "local/facts"}]
SECRETS = ("my-secret", "0f" * 16, "c2VjcmV0c2VjcmV0", "whsec_c2VjcmV0c2VjcmV0")


def statuses(hub: RunningHub, webhook_id: str) -> set[str]:
    return {delivery["status"] for delivery in hub.deliveries(webhook_id)}


Serve = Callable[[ASGIApp], str]


def test_every_secret_proves_a_delivery_in_either_scheme(
    hub: RunningHub, worktree: Path, serve: Serve
) -> None:
    heads: list[tuple[str, str | None]] = []

    def remember(name: str) -> Callable[..., None]:
        return lambda payload: heads.append((name, payload.repo.headSha))

    server = WebhooksServer()
    url, webhooks = serve(server.app), {}
    schemes: tuple[ProofScheme, ...] = ("secret", "standard-webhooks")
    for scheme, (number, secret) in product(schemes, enumerate(SECRETS)):
        name = f"{scheme}-{number}"
        server.add_webhook(f"/{name}", webhook_secret=secret, proof=scheme)(remember(name))
        webhooks[name] = hub.api.create_webhook(
            url=f"{url}/webhooks/{name}", watched=WATCHED, secret=secret
        ).id
    sha = push_file(hub, worktree, "a.txt", "1")
    for name, id in webhooks.items():
        wait_until(lambda id=id: "pending" not in statuses(hub, id) and statuses(hub, id))
        assert statuses(hub, id) == {"delivered"}, name
    assert {name for name, head in heads if head == sha} == set(webhooks)


def test_a_test_delivery_is_answered_and_reaches_no_handler(
    hub: RunningHub, worktree: Path, serve: Serve
) -> None:
    calls: list[WebhookPayload] = []
    server = WebhooksServer(webhook_secret="s3cret")
    server.add_webhook("/x")(lambda payload: calls.append(payload))
    url = f"{serve(server.app)}/webhooks/x"
    id = hub.api.create_webhook(url=url, watched=WATCHED, secret="s3cret").id
    hub.request("POST", f"/api/settings/webhooks/{id}/test")
    [delivery] = wait_until(lambda: [d for d in hub.deliveries(id) if d["status"] != "pending"])
    assert (delivery["status"], delivery["response_head"]) == ("delivered", '{"pong":true}')
    assert calls == []


def test_no_secret_is_ever_logged(
    hub: RunningHub, worktree: Path, serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """Through success, refusal, an error in the handler, a changed secret and a replay."""
    secrets = ("first-s3cret", "second-s3cret", "whsec_dGhpcmQtczNjcmV0")
    server = WebhooksServer(webhook_secret=list(secrets))

    @server.add_webhook("/x")
    def handle(payload: WebhookPayload) -> None:
        raise RuntimeError("not today")

    caplog.set_level(logging.DEBUG)
    for client in ("httpx", "httpcore"):  # which tell each URL, and which `pipeline.logs` silences
        caplog.set_level(logging.WARNING, client)
    host = serve(server.app).removeprefix("http://")
    url = f"http://ada:passw0rd@{host}/webhooks/x?secret=in-the-query"
    id = hub.api.create_webhook(url=url, watched=WATCHED, secret=secrets[0]).id
    push_file(hub, worktree, "a.txt", "1")
    for secret in ("wrong-s3cret", *secrets[1:]):
        hub.api.update_webhook(id, secret=secret)
        hub.request("POST", f"/api/settings/webhooks/{id}/test")
    wait_until(lambda: "pending" not in statuses(hub, id))
    hub.api.disable_webhook(id)
    hub.api.delete_webhook(id)
    assert "not today" in caplog.text
    for secret in (*secrets, "wrong-s3cret", "in-the-query", "passw0rd"):
        assert secret not in caplog.text, secret
