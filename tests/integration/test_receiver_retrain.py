"""The retrain handler on a real job store: what is stored, what is answered, and how fast."""

# ruff: noqa: F811  (a fixture that is imported and asked for)

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from jobs.outcome import JobOutcome, OutcomeResult
from jobs.store import JobStore
from receiver.retrain import RetrainRule, retrain_handler
from receiver.webhooks_server import WebhooksServer
from tests.receiver_fixtures import (  # noqa: F401
    no_secret_in_the_environment,
    rule,
    serve,
    store,
)
from tests.receiver_payloads import (
    NEW,
    body_of,
    dataset_update,
    ref_update,
)

RULES = [
    rule(settings={"seed": 1}),
    rule("answers-dev", ref="dev"),
    rule("answers-small", ref="dev"),
]


def receiver(store: JobStore, rules: list[RetrainRule] = RULES) -> WebhooksServer:
    server = WebhooksServer(webhook_secret="s3cret")
    server.add_webhook("/retrain", knows_repeats=True)(retrain_handler(store, rules))
    return server


@pytest.fixture
def post(store: JobStore) -> Iterator[Callable[..., dict[str, Any]]]:
    with TestClient(receiver(store).app, headers={"X-Webhook-Secret": "s3cret"}) as client:

        def send(payload: dict[str, Any], delivery_id: str | None = None) -> dict[str, Any]:
            headers = {} if delivery_id is None else {"Webhook-Id": delivery_id}
            answer = client.post("/webhooks/retrain", content=body_of(payload), headers=headers)
            assert answer.status_code == 200
            return dict(answer.json())

        yield send


def test_a_commit_becomes_a_job(store: JobStore, post: Callable[..., dict[str, Any]]) -> None:
    payload = dataset_update() | {"updatedConfig": {"kept": "as it was sent"}}
    answer = post(payload, "d1")
    (job,) = store.list()
    assert answer == {"job": job.id}
    assert job.state == "SCHEDULING"
    assert job.payload == payload
    assert job.spec.settings == {"seed": 1}
    assert job.spec.revisions is not None
    assert job.spec.revisions.new_sha is None, "it trains on the head when it starts"
    assert job.spec.revisions.delivery_ids == ("d1",)
    assert store.of_commit(NEW) == [job]


def finish(store: JobStore, result: OutcomeResult) -> None:
    job = store.claim("me", 60)
    assert job is not None
    store.finish(job.id, "me", JobOutcome(result=result))


def test_without_an_id_the_body_is_the_id(
    store: JobStore,
    post: Callable[..., dict[str, Any]],
) -> None:
    first = post(dataset_update())
    finish(store, "promoted")
    assert post(dataset_update()) == first
    assert post(dataset_update(ref_update(new="c" * 40))) != first


def test_several_pipelines_each_get_a_job(
    store: JobStore,
    post: Callable[..., dict[str, Any]],
) -> None:
    answer = post(dataset_update(ref_update("refs/heads/dev")), "d1")
    pipelines = {job.id: job.spec.pipeline for job in store.list()}
    assert answer["job"] == answer["jobs"][0]
    assert [pipelines[id] for id in answer["jobs"]] == ["answers-dev", "answers-small"]
    assert post(dataset_update(ref_update("refs/heads/dev")), "d1") == answer


def test_a_delivery_that_was_stored_for_some_pipelines_is_completed(store: JobStore) -> None:
    payload = dataset_update(ref_update("refs/heads/dev"))
    both: list[Any] = []
    for rules in (RULES[1:2], RULES[1:]):
        with TestClient(receiver(store, rules).app) as client:
            headers = {"Webhook-Id": "d1", "X-Webhook-Secret": "s3cret"}
            both.append(client.post("/webhooks/retrain", json=payload, headers=headers).json())
    assert both[1]["job"] == both[0]["job"]
    assert len(both[1]["jobs"]) == len(store.list()) == 2
