"""Connections from the hub to the receiver that break: each event reaches its handler once."""

import random
from collections import Counter
from itertools import chain, count
from pathlib import Path
from typing import Any

from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer
from tests.faulty_proxy import FAULTS, FaultyProxy
from tests.hub_fixtures import commit_file, running_hub, wait_until
from tests.ports import free_ports

SECRET = "s3cret"
NUM_EVENTS = 18
CHOICE = (*FAULTS, *["none"] * 4)


def test_each_event_reaches_its_handler_once(tmp_path: Path) -> None:
    [port] = free_ports(1)
    server = WebhooksServer(
        webhook_secret=SECRET,
        settings=ReceiverSettings(port=port),
    )
    handled: Counter[str] = Counter()

    @server.add_webhook
    def seen(payload: WebhookPayload) -> None:
        handled.update(update.ref for update in payload.updatedRefs or ())

    dice = random.Random(NUM_EVENTS)
    proxy = FaultyProxy(port, chain(FAULTS, (dice.choice(CHOICE) for _ in count())))
    settings: dict[str, Any] = {
        "delivery_schedule_seconds": (0, *[0.02] * 40),
        "delivery_timeout_seconds": 0.5,
        "refused_seconds": 0.05,
    }
    server.launch(prevent_thread_lock=True)
    try:
        with running_hub(tmp_path / "hub", **settings) as hub, proxy.running():
            work = tmp_path / "work"
            hub.git("clone", "-q", hub.create_dataset("local/facts"), str(work), cwd=tmp_path)
            webhook = hub.api.create_webhook(
                url=f"{proxy.url}/webhooks/seen",
                watched=[{"type": "user", "name": "local"}],
                secret=SECRET,
            )
            commit_file(hub, work, "facts.txt", "1")
            refs = [f"refs/tags/v{number}" for number in range(NUM_EVENTS)]
            for ref in refs:  # each is an event of its own
                hub.git("push", "-q", "origin", f"HEAD:{ref}", cwd=work)
            wait_until(lambda: handled.keys() >= set(refs), seconds=120)
            wait_until(
                lambda: {one["status"] for one in hub.deliveries(webhook.id)} == {"delivered"},
                seconds=120,
            )
            hub.api.delete_webhook(webhook.id)
    finally:
        server.close()
    assert handled == Counter(refs)
    assert all(proxy.num_faults.values()), proxy.num_faults
