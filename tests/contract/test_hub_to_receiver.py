"""The hub's deliveries at the receiver's door: each kind of secret, each proof, and the ping."""

import logging
from pathlib import Path

import pytest

from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.verify import ProofScheme
from receiver.webhooks_server import WebhooksServer
from tests.hub_fixtures import RunningHub, push_file, wait_until
from tests.receiver_fixtures import no_secret_in_the_environment  # noqa: F401

pytest_plugins = ["tests.hub_plugin"]

WATCHED = [{"type": "dataset", "name": "local/facts"}]
SECRETS = ("my-secret", "0f" * 16, "c2VjcmV0c2VjcmV0", "whsec_c2VjcmV0c2VjcmV0")


def statuses(hub: RunningHub, webhook_id: str) -> set[str]:
    return {delivery["status"] for delivery in hub.deliveries(webhook_id)}


def test_every_secret_proves_a_delivery_in_either_scheme(hub: RunningHub, worktree: Path) -> None:
    heads: list[tuple[str, str | None]] = []
    server = WebhooksServer(settings=ReceiverSettings(port=0))

    def handle(name: str, secret: str, scheme: ProofScheme) -> None:
        server.add_webhook(f"/{name}", webhook_secret=secret, proof=scheme)(
            lambda payload: heads.append((name, payload.repo.headSha))
        )

    webhooks = {}
    schemes: tuple[ProofScheme, ...] = ("secret", "standard-webhooks")
    names = {
        f"{scheme}-{number}": (secret, scheme)
        for number, secret in enumerate(SECRETS)
        for scheme in schemes
    }
    for name, (secret, scheme) in names.items():
        handle(name, secret, scheme)
    url = server.launch(prevent_thread_lock=True)
    try:
        for name, (secret, _) in names.items():
            webhooks[name] = hub.api.create_webhook(
                url=f"{url}/webhooks/{name}", watched=WATCHED, secret=secret
            ).id
        sha = push_file(hub, worktree, "a.txt", "1")
        for name, id in webhooks.items():
            wait_until(lambda id=id: "pending" not in statuses(hub, id) and statuses(hub, id))
            assert statuses(hub, id) == {"delivered"}, name
    finally:
        server.close()
    assert {name for name, head in heads if head == sha} == set(names)


def test_a_test_delivery_is_answered_and_reaches_no_handler(
    hub: RunningHub,
) -> None:
    calls = []
    server = WebhooksServer(webhook_secret="s3cret", settings=ReceiverSettings(port=0))

    @server.add_webhook("/x")
    def handle(payload: WebhookPayload) -> None:
        calls.append(payload)

    url = server.launch(prevent_thread_lock=True)
    try:
        hub.create_dataset("local/facts")
        created = hub.api.create_webhook(url=f"{url}/webhooks/x", watched=WATCHED, secret="s3cret")
        hub.request("POST", f"/api/settings/webhooks/{created.id}/test")
        [delivery] = wait_until(
            lambda: [d for d in hub.deliveries(created.id) if d["status"] != "pending"]
        )
    finally:
        server.close()
    assert delivery["status"] == "delivered"
    assert delivery["response_head"] == '{"pong":true}'
    assert calls == []


def test_no_secret_is_ever_logged(
    hub: RunningHub, worktree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Through success, refusal, an error in the handler, a changed secret and a replay."""
    secrets = ("first-s3cret", "second-s3cret", "whsec_dGhpcmQtczNjcmV0")
    server = WebhooksServer(webhook_secret=list(secrets), settings=ReceiverSettings(port=0))

    @server.add_webhook("/x")
    def handle(payload: WebhookPayload) -> None:
        raise RuntimeError("not today")

    caplog.set_level(logging.DEBUG)
    for client in ("httpx", "httpcore"):  # which tell each URL, and which `pipeline.logs` silences
        caplog.set_level(logging.WARNING, client)
    url = server.launch(prevent_thread_lock=True)
    try:
        host = url.removeprefix("http://")
        created = hub.api.create_webhook(
            url=f"http://ada:passw0rd@{host}/webhooks/x?secret=in-the-query",
            watched=WATCHED,
            secret=secrets[0],
        )
        push_file(hub, worktree, "a.txt", "1")
        for secret in ("wrong-s3cret", *secrets[1:]):
            hub.api.update_webhook(created.id, secret=secret)
            hub.request("POST", f"/api/settings/webhooks/{created.id}/test")
        wait_until(lambda: "pending" not in statuses(hub, created.id))
        hub.api.disable_webhook(created.id)
        hub.api.delete_webhook(created.id)
    finally:
        server.close()
    assert "not today" in caplog.text
    for secret in (*secrets, "wrong-s3cret", "in-the-query", "passw0rd"):
        assert secret not in caplog.text, secret
