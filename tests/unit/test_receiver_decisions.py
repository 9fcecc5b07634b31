"""Ten thousand payloads, right, nearly right and wrong, past the door as far as the decision."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.spec import JobSpec
from receiver.errors import ProofMissing, ProofWrong
from receiver.payload import WebhookPayload
from receiver.rules import RetrainRule, decide
from receiver.senders import NotAPush, read_event
from receiver.verify import Proof, ProofScheme
from tests.property.test_receiver_payloads import BODIES
from tests.receiver_payloads import SIGNING_SECRET, hmac_hex, standard_headers

RULES = [
    RetrainRule(pipeline="main", dataset="acme/answers"),
    RetrainRule(pipeline="dev", dataset="acme/answers", ref="dev"),
]
SCHEMES: tuple[ProofScheme, ...] = ("secret", "standard-webhooks")


def proven(scheme: ProofScheme, body: bytes) -> dict[str, str]:
    if scheme == "standard-webhooks":
        return standard_headers(body)
    return {"x-webhook-secret": SIGNING_SECRET}


@settings(max_examples=10_000, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=BODIES, scheme=st.sampled_from(SCHEMES))
def test_a_payload_is_refused_or_leads_to_jobs_or_to_a_reason(
    body: bytes, scheme: ProofScheme
) -> None:
    proof = Proof(scheme=scheme, secrets=(SIGNING_SECRET,))
    proof.check(proven(scheme, body), body)
    for wrong in ({}, {**proven(scheme, body), "x-webhook-secret": "w", "webhook-signature": "w"}):
        with pytest.raises((ProofMissing, ProofWrong)):
            proof.check(wrong, body)
    event = read_event(scheme, {}, body)
    if isinstance(event, NotAPush):
        assert json.loads(body)["event"]["scope"] == "ping"
        return
    try:
        payload = WebhookPayload.model_validate_json(event)
    except ValidationError:
        return
    decision = decide(payload, RULES)
    if isinstance(decision, str):
        assert decision
    for spec in () if isinstance(decision, str) else decision:
        assert_answers_for(spec, payload)


def assert_answers_for(spec: JobSpec, payload: WebhookPayload) -> None:
    told: list[Any] = [update.newSha for update in payload.updatedRefs or ()]
    assert spec.pipeline in ("main", "dev")
    assert spec.revisions is not None
    assert spec.revisions.new_sha in told or spec.revisions.new_sha == payload.repo.headSha


@settings(max_examples=1_000, deadline=None)
@given(body=st.binary(max_size=200), header=st.text("0123456789abcdef=sha", max_size=80))
def test_no_made_up_signature_holds(body: bytes, header: str) -> None:
    for scheme, name in (("github", "x-hub-signature-256"), ("gitea", "x-gitea-signature")):
        proof = Proof(scheme=scheme, secrets=("s3cret",))  # type: ignore[arg-type]
        if header not in (hmac_hex("s3cret", body), f"sha256={hmac_hex('s3cret', body)}"):
            with pytest.raises(ProofWrong):
                proof.check({name: header}, body)
