"""Payloads that are right, nearly right and wrong, past the door as far as the decision."""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.spec import JobSpec
from receiver.errors import NotAnEvent, ProofMissing, ProofWrong
from receiver.payload import WebhookPayload
from receiver.rules import decide
from receiver.verify import Proof, ProofScheme, PushSender, read_event
from tests.property.test_receiver_payloads import BODIES, JSON, REFS
from tests.receiver_fixtures import rule
from tests.receiver_payloads import (
    GITEA_PUSH,
    GITHUB_PUSH,
    GITLAB_PUSH,
    SIGNING_SECRET,
    ZEROS,
    hmac_hex,
    standard_headers,
)

HUB_SCHEMES: tuple[ProofScheme, ...] = ("secret", "standard-webhooks")
PUSHES: dict[PushSender, dict[str, Any]] = {
    "github": GITHUB_PUSH,
    "gitea": GITEA_PUSH,
    "gitlab": GITLAB_PUSH,
}
PUSH_NAMES: dict[PushSender, tuple[str, str]] = {
    "github": ("x-github-event", "push"),
    "gitea": ("x-gitea-event", "push"),
    "gitlab": ("x-gitlab-event", "Push Hook"),
}
RULES = [
    rule("main"),
    rule("dev", ref="dev"),
    rule("github", GITHUB_PUSH["repository"]["clone_url"]),
    rule("gitea", GITEA_PUSH["repository"]["clone_url"]),
    rule("gitlab", GITLAB_PUSH["project"]["git_http_url"]),
]

Sent = tuple[ProofScheme, dict[str, str], bytes]
"""The scheme, the headers but for the proof, the body."""


@st.composite
def pushes(draw: st.DrawFn, sender: PushSender) -> bytes:
    """Nearly right: some members were replaced or taken away."""
    update = draw(REFS)
    push = {
        **PUSHES[sender],
        "ref": update["ref"],
        "before": update["oldSha"] or ZEROS,
        "after": update["newSha"] or ZEROS,
    }
    for name in draw(st.lists(st.sampled_from(sorted(push)), max_size=1)):
        push[name] = draw(JSON)
    for name in draw(st.lists(st.sampled_from(sorted(push)), max_size=1)):
        push.pop(name)
    return json.dumps(push).encode()


@st.composite
def sent_by_others(draw: st.DrawFn) -> Sent:
    sender = draw(st.sampled_from(sorted(PUSHES)))
    header, push_name = PUSH_NAMES[sender]
    named = draw(st.sampled_from([push_name] * 5 + ["ping", "issues", ""]))
    return sender, {header: named} if named else {}, draw(pushes(sender) | BODIES)


def proven(scheme: ProofScheme, body: bytes) -> dict[str, str]:
    if scheme == "secret":
        return {"x-webhook-secret": SIGNING_SECRET}
    if scheme == "github":
        return {"x-hub-signature-256": f"sha256={hmac_hex(SIGNING_SECRET, body)}"}
    if scheme == "gitea":
        return {"x-gitea-signature": hmac_hex(SIGNING_SECRET, body)}
    return standard_headers(body)


WRONG = dict.fromkeys(
    ("x-webhook-secret", "webhook-signature", "x-hub-signature-256", "x-gitea-signature"), "w"
)


def is_push(scheme: ProofScheme, headers: dict[str, str], body: bytes) -> bool:
    if scheme in PUSH_NAMES:
        header, push_name = PUSH_NAMES[scheme]
        return headers.get(header) == push_name
    return bool(json.loads(body)["event"]["scope"] != "ping")


SENT = st.tuples(st.sampled_from(HUB_SCHEMES), st.just({}), BODIES) | sent_by_others()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=SENT)
def test_a_payload_is_refused_or_leads_to_jobs_or_to_a_reason(sent: Sent) -> None:
    assert_is_refused_or_decided(sent)


def assert_is_refused_or_decided(sent: Sent) -> None:
    scheme, headers, body = sent
    proof = Proof(scheme=scheme, secrets=(SIGNING_SECRET,))
    right = {**headers, **proven(scheme, body)}
    proof.check_headers(right)(body)
    for wrong in (headers, {**right, **WRONG}):
        with pytest.raises((ProofMissing, ProofWrong)):
            proof.check_headers(wrong)(body)
    try:
        event = read_event(scheme, right, body)
    except NotAnEvent:
        assert scheme in PUSHES
        return
    if not isinstance(event, bytes):
        assert not is_push(scheme, headers, body)
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
    assert spec.pipeline in {each.spec.pipeline for each in RULES}
    assert spec.revisions is not None
    assert spec.revisions.new_sha in told or spec.revisions.new_sha == payload.repo.headSha
