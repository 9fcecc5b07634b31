"""Whatever is posted: no 5xx, nothing accepted without proof, at most one job per delivery."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from jobs.store import JobStore
from receiver.retrain import retrain_handler
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import rule
from tests.receiver_payloads import OLD, dataset_update

NUM_EXAMPLES = int(os.environ.get("RECEIVER_EXAMPLES", "150"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
SHAS = st.none() | st.text(max_size=5) | st.text("0123456789abcdef", min_size=40, max_size=40)
REFS = st.fixed_dictionaries(
    {
        "ref": st.sampled_from(["refs/heads/main", "refs/heads/dev", "refs/tags/v1", "refs/pr/1"])
        | st.text(),
        "oldSha": SHAS | st.just(OLD),
        "newSha": SHAS,
    }
)


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    """Nearly right: one payload in which some members were replaced or taken away."""
    payload = dataset_update(
        *draw(st.lists(REFS, min_size=1, max_size=3)),
        name=draw(st.sampled_from(["acme/answers", "acme/other"]) | st.text()),
        type=draw(st.sampled_from(["dataset", "model", "space", "bucket", "vessel"])),
        action=draw(st.sampled_from(["update", "create", "delete", "move", "explode"])),
        scope=draw(st.sampled_from(["repo.content", "repo", "repo.config", "."]) | st.text()),
    )
    payload["webhook"]["id"] = draw(st.just("hook") | st.text())
    for name in draw(st.lists(st.sampled_from(sorted(payload)), max_size=1)):
        payload[name] = draw(JSON)
    for name in draw(st.lists(st.sampled_from(sorted(payload)), max_size=1)):
        payload.pop(name)
    return payload


BODIES = payloads().map(json.dumps).map(str.encode) | JSON.map(json.dumps).map(str.encode)
IDS = st.none() | st.text("abc ;,é\xff", min_size=1, max_size=3)


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TestClient, JobStore]]:
    folder: Path = tmp_path_factory.mktemp("receiver")
    rules = [
        rule("main"),
        rule("dev", ref="dev"),
    ]
    with JobStore.open(folder / "jobs.db") as store:
        server = WebhooksServer(webhook_secret="s3cret")
        server.add_webhook("/retrain", knows_repeats=True)(retrain_handler(store, rules))
        with TestClient(server.app) as client:
            yield client, store


def post(client: TestClient, body: bytes, secret: str | None, delivery_id: str | None) -> Any:
    headers: dict[str | bytes, str | bytes] = {}
    if secret is not None:
        headers[b"X-Webhook-Secret"] = secret.encode("latin-1")
    if delivery_id is not None:
        headers[b"Webhook-Id"] = delivery_id.encode("latin-1")
    return client.post("/webhooks/retrain", content=body, headers=headers)


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(body=BODIES | st.binary(max_size=40), delivery_id=IDS)
def test_a_proven_request_is_answered_or_refused_and_answered_the_same_again(
    opened: tuple[TestClient, JobStore], body: bytes, delivery_id: str | None
) -> None:
    client, store = opened
    answer = post(client, body, "s3cret", delivery_id)
    assert answer.status_code in (200, 422), answer.text
    if answer.status_code == 200:
        assert set(answer.json()) in ({"job"}, {"job", "jobs"}, {"ignored"})
        jobs = len(store.list())
        assert post(client, body, "s3cret", delivery_id).json() == answer.json()
        assert len(store.list()) == jobs
