"""Proof that a delivery comes from who it says: checked on the raw bytes, in constant time.

The scheme is configured for a handler, never guessed from a request: another sender's valid proof
is no proof. Nothing here parses a body.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from standardwebhooks import Webhook, WebhookVerificationError

from receiver.errors import ProofMissing, ProofWrong

ProofScheme = Literal["secret", "standard-webhooks", "github", "gitea", "gitlab"]

SIGNING_PREFIX = "whsec_"


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One scheme and the secrets that satisfy it; several while one is being rotated.

    Raises `ValueError` for a secret that the scheme cannot carry. Without secrets, everyone is let
    in.
    """

    scheme: ProofScheme
    secrets: tuple[str, ...]

    def __post_init__(self) -> None:
        for secret in self.secrets:
            if not secret:
                raise ValueError("a webhook secret is empty; leave it out, or give it a value")
            if not (secret.isascii() and secret.isprintable()):
                raise ValueError("a webhook secret must be printable ASCII: it travels in a header")
            _check_signing(secret)

    def check(self, headers: Mapping[str, str], body: bytes) -> None:
        """Raise `ProofMissing` or `ProofWrong` unless `headers` prove `body`.

        `headers` are looked up in lower case.
        """
        if self.secrets:
            _CHECKS[self.scheme](self.secrets, headers, body)


def _check_secret(secrets: Sequence[str], headers: Mapping[str, str], _body: bytes) -> None:
    """https://huggingface.co/docs/hub/webhooks#webhook-secret: the secret, verbatim."""
    given = _required(headers, "x-webhook-secret")
    if not _matches_any(given, secrets):
        raise ProofWrong("Invalid webhook secret.")


def _check_standard(secrets: Sequence[str], headers: Mapping[str, str], body: bytes) -> None:
    """https://www.standardwebhooks.com: HMAC-SHA256 over `id.timestamp.body`, at most 5 min old.

    The key is the base64 part of a `whsec_` secret, else the secret's own bytes. Svix, which the
    standard comes from, calls the headers `svix-…`: https://docs.svix.com/receiving/verifying-payloads/how-manual
    """
    prefix = "svix" if is_svix(headers) else "webhook"
    signed = {
        f"webhook-{name}": _required(headers, f"{prefix}-{name}")
        for name in ("id", "timestamp", "signature")
    }
    reasons = []
    for secret in secrets:
        try:
            _signer(secret).verify(body, signed, json_parse=False)
            return
        except (WebhookVerificationError, ValueError) as error:
            # ValueError: a signature that is no base64, a body that is no UTF-8.
            reasons.append(str(error))
    raise ProofWrong(f"Invalid webhook signature: {reasons[0]}.")


def is_svix(headers: Mapping[str, str]) -> bool:
    """Whether a Standard Webhooks signature stands under Svix's names, and covers `svix-id`."""
    return "svix-signature" in headers and "webhook-signature" not in headers


def _check_github(secrets: Sequence[str], headers: Mapping[str, str], body: bytes) -> None:
    """https://docs.github.com/webhooks/using-webhooks/validating-webhook-deliveries"""
    given = _required(headers, "x-hub-signature-256")
    if not _matches_any(given, [f"sha256={_hmac_hex(secret, body)}" for secret in secrets]):
        raise ProofWrong("Invalid webhook signature.")


def _check_gitea(secrets: Sequence[str], headers: Mapping[str, str], body: bytes) -> None:
    """https://docs.gitea.com/usage/webhooks: the bare hex digest."""
    given = _required(headers, "x-gitea-signature")
    if not _matches_any(given, [_hmac_hex(secret, body) for secret in secrets]):
        raise ProofWrong("Invalid webhook signature.")


def _check_gitlab(secrets: Sequence[str], headers: Mapping[str, str], body: bytes) -> None:
    """https://docs.gitlab.com/user/project/integrations/webhooks: secret token or signing token.

    A secret that begins with `whsec_` is a signing token; the others are secret tokens. GitLab 19
    sends `webhook-id` with both, so that the header cannot tell them apart.
    """
    signing = [secret for secret in secrets if secret.startswith(SIGNING_PREFIX)]
    verbatim = [secret for secret in secrets if not secret.startswith(SIGNING_PREFIX)]
    if signing and ("webhook-signature" in headers or not verbatim):
        _check_standard(signing, headers, body)
    elif not _matches_any(_required(headers, "x-gitlab-token"), verbatim):
        raise ProofWrong("Invalid webhook secret.")


_CHECKS: dict[ProofScheme, Callable[[Sequence[str], Mapping[str, str], bytes], None]] = {
    "secret": _check_secret,
    "standard-webhooks": _check_standard,
    "github": _check_github,
    "gitea": _check_gitea,
    "gitlab": _check_gitlab,
}


def _required(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise ProofMissing(f"{name} header not set.")
    return value


def _matches_any(given: str, expected: Sequence[str]) -> bool:
    # Digests have one length, so that the time tells nothing of the secret's; every candidate is
    # compared, so that it tells nothing of which one matched.
    given_digest = hashlib.sha256(given.encode()).digest()
    matches = [
        hmac.compare_digest(given_digest, hashlib.sha256(candidate.encode()).digest())
        for candidate in expected
    ]
    return any(matches)


def _hmac_hex(secret: str, body: bytes) -> str:
    return hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()


def _signer(secret: str) -> Webhook:
    return Webhook(secret if secret.startswith(SIGNING_PREFIX) else secret.encode())


def _check_signing(secret: str) -> None:
    """Raise ValueError for a secret that says of itself that it signs, and cannot."""
    if secret.startswith(SIGNING_PREFIX):
        try:
            key = base64.b64decode(secret.removeprefix(SIGNING_PREFIX), validate=True)
        except ValueError:
            key = b""
        if not key:
            raise ValueError(
                f"a webhook secret that begins with {SIGNING_PREFIX!r} must go on in base64"
            )
