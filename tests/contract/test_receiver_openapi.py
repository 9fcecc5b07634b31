"""Whatever fits the receiver's OpenAPI description, or nearly: no 5xx, nothing unproven in."""

import hashlib
from collections.abc import Callable, Iterator

import hypothesis
import pytest
import schemathesis
from requests import PreparedRequest
from schemathesis import Case, GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import status_code_conformance

from receiver.payload import WebhookPayload
from receiver.settings import ReceiverSettings
from receiver.webhooks_server import WebhooksServer, measure
from tests.receiver_payloads import SIGNING_SECRET, hmac_hex, standard_headers

CHECKS = [not_a_server_error, status_code_conformance]
READABLE = ("/", "/health", "/metrics")
PATHS = ("simple", "github", "signed")
WRONG = dict.fromkeys(("X-Webhook-Secret", "X-Hub-Signature-256"), "wrong")


def proven(request: PreparedRequest) -> PreparedRequest:
    """With every sender's proof of its body; each door looks at its own."""
    body = request.body or b""
    data = body.encode() if isinstance(body, str) else body
    proofs = {
        "X-Webhook-Secret": "s3cret",
        "X-Hub-Signature-256": f"sha256={hmac_hex('s3cret', data)}",
        "X-GitHub-Event": "push",
    }
    # A repeated delivery would be answered from memory.
    id = hashlib.sha256(data).hexdigest()
    request.headers.update(standard_headers(data, id=id) | proofs)
    return request


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = WebhooksServer(webhook_secret="s3cret", settings=ReceiverSettings(port=0))
    measure(server)

    @server.add_webhook
    async def simple(payload: WebhookPayload) -> str:
        return payload.repo.name

    server.add_webhook("/github", proof="github")(simple)
    server.add_webhook("/signed", proof="standard-webhooks", webhook_secret=SIGNING_SECRET)(simple)
    yield server.launch(prevent_thread_lock=True)
    server.close()


@pytest.fixture(scope="module")
def operations(url: str) -> dict[str, APIOperation]:
    # Not through its pytest plugin, which reaches into pytest's inside.
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    found = [result.ok() for result in schema.get_all_operations()]
    return {operation.path: operation for operation in found}


def examples(operation: APIOperation, mode: GenerationMode, test: Callable[[Case], None]) -> None:
    settings = hypothesis.settings(
        max_examples=10,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        database=None,
    )
    settings(hypothesis.given(operation.as_strategy(generation_mode=mode))(test))()


def test_every_route_is_described(operations: dict[str, APIOperation]) -> None:
    assert set(operations) == {*READABLE, *(f"/webhooks/{path}" for path in PATHS)}


@pytest.mark.parametrize("path", READABLE)
def test_what_anyone_may_read(operations: dict[str, APIOperation], path: str) -> None:
    def check(case: Case) -> None:
        case.call_and_validate()

    examples(operations[path], GenerationMode.POSITIVE, check)


@pytest.mark.parametrize("mode", list(GenerationMode), ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_no_answer_is_a_5xx_and_nothing_is_accepted_without_proof(
    operations: dict[str, APIOperation], path: str, mode: GenerationMode
) -> None:
    def check(case: Case) -> None:
        for headers in ({}, WRONG):
            assert case.call(headers=headers).status_code in (401, 403)
        answer = case.call_and_validate(auth=proven, checks=CHECKS)
        if mode is GenerationMode.POSITIVE:
            assert answer.status_code not in (401, 403), "the proof holds"

    examples(operations[f"/webhooks/{path}"], mode, check)
