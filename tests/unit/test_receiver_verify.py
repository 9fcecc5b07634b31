"""Each proof, right and wrong, and the configurations that cannot be."""

import hmac
import time

import pytest

from receiver.errors import ProofMissing, ProofWrong
from receiver.verify import Proof, ProofScheme
from tests.receiver_payloads import (
    OTHER_SIGNING_SECRET,
    SIGNING_SECRET,
    hmac_hex,
    standard_headers,
)

BODY = b'{"zen": "Keep it logically awesome."}'


def check(
    scheme: ProofScheme, headers: dict[str, str], *secrets: str, body: bytes = BODY
) -> str | None:
    """None where the proof holds, else the name of the refusal."""
    try:
        Proof(scheme=scheme, secrets=secrets or ("s3cret",)).check_headers(headers)(body)
    except (ProofMissing, ProofWrong) as refusal:
        return type(refusal).__name__
    return None


def test_the_secret_verbatim() -> None:
    assert check("secret", {"x-webhook-secret": "s3cret"}) is None
    assert check("secret", {"x-webhook-secret": "S3cret"}) == "ProofWrong"
    assert check("secret", {"x-webhook-secret": ""}) == "ProofWrong"
    assert check("secret", {"x-webhook-secret": "s3cr\xe9t"}) == "ProofWrong"
    assert check("secret", {}) == "ProofMissing"


def test_standard_webhooks() -> None:
    good = standard_headers(BODY)
    assert check("standard-webhooks", good, SIGNING_SECRET) is None
    assert check("standard-webhooks", good, OTHER_SIGNING_SECRET, SIGNING_SECRET) is None
    assert check("standard-webhooks", good, OTHER_SIGNING_SECRET) == "ProofWrong"
    assert check("standard-webhooks", good, SIGNING_SECRET, body=BODY + b" ") == "ProofWrong"
    for name in good:
        partly = {key: value for key, value in good.items() if key != name}
        assert check("standard-webhooks", partly, SIGNING_SECRET) == "ProofMissing"
    several = good | {"webhook-signature": "v1a,xyz v1,AAAA " + good["webhook-signature"]}
    assert check("standard-webhooks", several, SIGNING_SECRET) is None


@pytest.mark.parametrize("age_seconds", [-400, 400])
def test_a_signature_of_another_time_is_a_replay(age_seconds: int) -> None:
    stale = standard_headers(BODY, at=time.time() - age_seconds)
    assert check("standard-webhooks", stale, SIGNING_SECRET) == "ProofWrong"


@pytest.mark.parametrize(
    "change",
    [
        {"webhook-signature": "v1"},
        {"webhook-signature": "v1,%%%"},
        {"webhook-signature": "v2,AAAA"},
        {"webhook-timestamp": "soon"},
        {"webhook-timestamp": "nan"},
        {"webhook-timestamp": "1e400"},
    ],
)
def test_a_malformed_signature_is_wrong(change: dict[str, str]) -> None:
    headers = standard_headers(BODY) | change
    assert check("standard-webhooks", headers, SIGNING_SECRET) == "ProofWrong"


def test_a_signed_body_that_is_no_text() -> None:
    body = b"\xff\xfe"
    assert (
        check("standard-webhooks", standard_headers(body), SIGNING_SECRET, body=body)
        == "ProofWrong"
    )


def test_github() -> None:
    assert check("github", {"x-hub-signature-256": "sha256=" + hmac_hex("s3cret", BODY)}) is None
    assert check("github", {"x-hub-signature-256": hmac_hex("s3cret", BODY)}) == "ProofWrong"
    assert check("github", {"x-hub-signature-256": "sha256="}) == "ProofWrong"
    assert check("github", {"x-hub-signature": "sha1=abc"}) == "ProofMissing"
    # The example of GitHub's documentation.
    digest = "757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"
    told = {"x-hub-signature-256": f"sha256={digest}"}
    assert check("github", told, "It's a Secret to Everybody", body=b"Hello, World!") is None


def test_gitea() -> None:
    assert check("gitea", {"x-gitea-signature": hmac_hex("s3cret", BODY)}) is None
    assert check("gitea", {"x-gitea-signature": hmac_hex("other", BODY)}) == "ProofWrong"
    github = {"x-hub-signature-256": "sha256=" + hmac_hex("s3cret", BODY)}
    assert check("gitea", github) == "ProofMissing", "another sender's proof is no proof"


def test_gitlab_by_token_or_by_signature() -> None:
    assert check("gitlab", {"x-gitlab-token": "s3cret"}) is None
    assert check("gitlab", {"x-gitlab-token": "other"}) == "ProofWrong"
    assert check("gitlab", {}) == "ProofMissing"
    signed = standard_headers(BODY)
    assert check("gitlab", signed, SIGNING_SECRET) is None
    assert check("gitlab", signed, "s3cret") == "ProofMissing"
    assert check("gitlab", {"x-gitlab-token": SIGNING_SECRET}, SIGNING_SECRET) == "ProofMissing"
    assert check("gitlab", signed, "s3cret", SIGNING_SECRET) is None, "while moving to signatures"
    assert check("gitlab", {"x-gitlab-token": "s3cret"}, "s3cret", SIGNING_SECRET) is None


def test_every_candidate_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = []
    compare_digest = hmac.compare_digest

    def watch(one: bytes, other: bytes) -> bool:
        compared.append((len(one), len(other)))
        return compare_digest(one, other)

    monkeypatch.setattr(hmac, "compare_digest", watch)
    assert check("secret", {"x-webhook-secret": "one"}, "one", "two", "three") is None
    assert compared == [(32, 32)] * 3


@pytest.mark.parametrize(
    ("scheme", "secret"),
    [
        ("secret", ""),
        ("secret", "sécret"),
        ("secret", "two\nlines"),
        ("standard-webhooks", "whsec_"),
        ("standard-webhooks", "whsec_not*base64"),
        ("gitlab", "whsec_"),
        ("secret", "whsec_not*base64"),
    ],
)
def test_a_secret_that_cannot_hold_is_refused_at_once(scheme: ProofScheme, secret: str) -> None:
    with pytest.raises(ValueError, match="secret"):
        Proof(scheme=scheme, secrets=(secret,))
