"""Payloads that are right, nearly right and wrong, as far as the decision."""

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from jobs.spec import JobSpec
from receiver.errors import NotAnEvent
from receiver.payload import WebhookPayload
from receiver.rules import decide
from receiver.verify import ProofScheme, PushSender, read_event
from tests.property.test_receiver_payloads import BODIES, JSON, REFS
from tests.receiver_fixtures import rule
from tests.receiver_payloads import GITEA_PUSH, GITHUB_PUSH, GITLAB_PUSH, ZEROS
from tests.unit.test_receiver_senders import HEADERS, PUSHES

RULES = [
    rule("main"),
    rule("dev", ref="dev"),
    rule("github", GITHUB_PUSH["repository"]["clone_url"]),
    rule("gitea", GITEA_PUSH["repository"]["clone_url"]),
    rule("gitlab", GITLAB_PUSH["project"]["git_http_url"]),
]

Sent = tuple[ProofScheme, dict[str, str], bytes]
"""The scheme, the headers, the body."""


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
    return sender, HEADERS[sender], draw(pushes(sender) | BODIES)


SENT = st.tuples(st.just("secret"), st.just({}), BODIES) | sent_by_others()


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(sent=SENT)
def test_a_payload_is_refused_or_leads_to_jobs_or_to_a_reason(sent: Sent) -> None:
    try:
        event = read_event(*sent)
    except NotAnEvent:
        return
    assert isinstance(event, bytes)
    try:
        payload = WebhookPayload.model_validate_json(event)
    except ValidationError:
        return
    decision = decide(payload, RULES)
    for spec in () if isinstance(decision, str) else decision:
        assert_answers_for(spec, payload)


def assert_answers_for(spec: JobSpec, payload: WebhookPayload) -> None:
    told: list[Any] = [update.newSha for update in payload.updatedRefs or ()]
    assert spec.pipeline in {each.spec.pipeline for each in RULES}
    assert spec.revisions is not None
    assert spec.revisions.new_sha in told or spec.revisions.new_sha == payload.repo.headSha
