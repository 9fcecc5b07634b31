"""Checks the proof of a delivery, and reads its event.

The proof is a secret or a signature, and it shows that the configured sender has sent the delivery.
A signature is checked on the raw bytes of the body, before the body is parsed. Secrets and
signatures are compared in constant time.

Each handler has one configured scheme, such as `github`, which says how a sender proves a delivery,
and in which format it sends events. The scheme is never guessed from the request, so a valid proof
of another scheme is refused. Push events of GitHub, Gitea and GitLab are turned into a
`WebhookPayload`, the format of the Hugging Face Hub. With the schemes `secret` and
`standard-webhooks`, an event must already be a `WebhookPayload`, and it is not changed.
"""

import base64
import hashlib
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal
from urllib.parse import unquote_to_bytes

from pydantic import AliasPath, BaseModel, Field, ValidationError, field_validator
from standardwebhooks import Webhook as Signer
from standardwebhooks import WebhookVerificationError

from receiver.errors import NotAnEvent, ProofMissing, ProofWrong
from receiver.payload import (
    PING,
    Event,
    ObjectId,
    Repo,
    UpdatedRef,
    Url,
    WebhookPayload,
    WebhookReference,
)

PushSender = Literal["github", "gitea", "gitlab"]
ProofScheme = Literal["secret", "standard-webhooks", "github", "gitea", "gitlab"]

BodyCheck = Callable[[bytes], None]
"""The part of a check that needs the body. It raises `ProofWrong` if the body does not match."""

SIGNING_PREFIX = "whsec_"
_SECRET_HEADER = "x-webhook-secret"
_FORM_FIELD = b"payload="
_EVENT_HEADERS: dict[PushSender, tuple[str, tuple[str, ...]]] = {
    "github": ("x-github-event", ("push",)),
    "gitea": ("x-gitea-event", ("push",)),
    "gitlab": ("x-gitlab-event", ("Push Hook", "Tag Push Hook")),
}


@dataclass(frozen=True, kw_only=True)
class Proof:
    """One scheme, and the accepted secrets. While a new secret replaces an old one, both secrets
    may be accepted. Without secrets, every request is accepted.

    The constructor raises `ValueError` for a secret that is empty or cannot be sent in a header. It
    also raises `ValueError` for a secret that begins with `whsec_` but does not continue with a
    base64 key.
    """

    scheme: ProofScheme
    secrets: tuple[str, ...]

    def __post_init__(self) -> None:
        for secret in self.secrets:
            if not secret:
                raise ValueError("a webhook secret is empty: set a value, or leave the secret out")
            if not (secret.isascii() and secret.isprintable()):
                raise ValueError(
                    "a webhook secret must be printable ASCII, because it is sent in a header"
                )
            check_signing_secret(secret)

    def check_headers(self, headers: Mapping[str, str], query: Mapping[str, str] = {}) -> BodyCheck:
        """Do the part of the check that needs only the headers. Returns a function that does the
        rest of the check when it is called with the body.

        The names in `headers` must be in lower case. With the scheme `secret`, the secret may be in
        `query` (`?secret=…`) instead of the header. Raises `ProofMissing` or `ProofWrong`.
        """
        if self.scheme == "secret" and _SECRET_HEADER not in headers and "secret" in query:
            headers = {_SECRET_HEADER: query["secret"]}
        return _CHECKS[self.scheme](self.secrets, headers) if self.secrets else _accept


def _accept(_body: bytes) -> None:
    pass


def _check_secret(secrets: Sequence[str], headers: Mapping[str, str]) -> BodyCheck:
    """The header contains the secret itself. See
    https://huggingface.co/docs/hub/webhooks#webhook-secret."""
    given = _required(headers, _SECRET_HEADER)
    if not _matches_any(given, secrets):
        raise ProofWrong("Invalid webhook secret.")
    return _accept


def _check_standard(secrets: Sequence[str], headers: Mapping[str, str]) -> BodyCheck:
    """The signature is an HMAC-SHA256 of `id.timestamp.body`. The timestamp may differ from the
    present time by at most 5 min. See https://www.standardwebhooks.com."""
    names = ("webhook-id", "webhook-timestamp", "webhook-signature")
    signed = {name: _required(headers, name) for name in names}

    def check(body: bytes) -> None:
        reasons = []
        for secret in secrets:
            try:
                signer(secret).verify(body, signed, json_parse=False)
                return
            except (WebhookVerificationError, ValueError) as error:
                # A ValueError means one of these: an entry of the signature header does not have
                # exactly one comma, a signature is not base64, or the body is not UTF-8.
                reasons.append(str(error))
        raise ProofWrong(f"Invalid webhook signature: {reasons[0]}.")

    return check


def _check_hmac(
    header: str, prefix: str, secrets: Sequence[str], headers: Mapping[str, str]
) -> BodyCheck:
    """The header is `prefix` and the hex digest of an HMAC-SHA256 of the body. See
    https://docs.github.com/webhooks/using-webhooks/validating-webhook-deliveries and
    https://docs.gitea.com/usage/webhooks."""
    given = _required(headers, header)

    def check(body: bytes) -> None:
        digests = [hmac.new(secret.encode(), body, hashlib.sha256) for secret in secrets]
        if not _matches_any(given, [prefix + digest.hexdigest() for digest in digests]):
            raise ProofWrong("Invalid webhook signature.")

    return check


def _check_gitlab(secrets: Sequence[str], headers: Mapping[str, str]) -> BodyCheck:
    """GitLab has two kinds of secrets. A *signing token* begins with `whsec_`. GitLab uses it to
    sign deliveries as in Standard Webhooks. Any other secret is a *secret token*, which GitLab
    sends as it is. See
    https://docs.gitlab.com/user/project/integrations/webhooks.

    GitLab 19 sends the header `webhook-id` with both kinds, so only `webhook-signature` shows that
    a delivery is signed.
    """
    signing = [secret for secret in secrets if is_signing_secret(secret)]
    tokens = [secret for secret in secrets if not is_signing_secret(secret)]
    if signing and ("webhook-signature" in headers or not tokens):
        return _check_standard(signing, headers)
    if not _matches_any(_required(headers, "x-gitlab-token"), tokens):
        raise ProofWrong("Invalid webhook secret.")
    return _accept


_CHECKS: dict[ProofScheme, Callable[[Sequence[str], Mapping[str, str]], BodyCheck]] = {
    "secret": _check_secret,
    "standard-webhooks": _check_standard,
    "github": partial(_check_hmac, "x-hub-signature-256", "sha256="),
    "gitea": partial(_check_hmac, "x-gitea-signature", ""),
    "gitlab": _check_gitlab,
}


def _required(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name)
    if value is None:
        raise ProofMissing(f"{name} header not set.")
    return value


def _matches_any(given: str, expected: Sequence[str]) -> bool:
    # The time that this function takes must tell an attacker nothing about the secrets. All digests
    # have the same length, so the time does not depend on the length of a secret. The given value
    # is compared with every expected value, so the time does not show which one matched.
    given_digest = hashlib.sha256(given.encode()).digest()
    matches = [
        hmac.compare_digest(given_digest, hashlib.sha256(candidate.encode()).digest())
        for candidate in expected
    ]
    return any(matches)


def is_signing_secret(secret: str) -> bool:
    """Whether the secret is a signing key (`whsec_…`), which signs deliveries and is never sent."""
    return secret.startswith(SIGNING_PREFIX)


def signer(secret: str) -> Signer:
    """An object that signs and verifies deliveries. If the secret begins with `whsec_`, the key is
    the rest of the secret, decoded from base64. Any other secret is itself the key.

    The library skips characters that are not base64, so it would silently make another key from a
    mistyped secret. It raises `ValueError` only if it cannot decode the rest. So pass only secrets
    that `check_signing_secret` accepts.
    """
    return Signer(secret if is_signing_secret(secret) else secret.encode())


def check_signing_secret(secret: str) -> str:
    """Return the secret unchanged. Raises `ValueError` if the secret begins with `whsec_` but does
    not continue with a base64 key."""
    if is_signing_secret(secret):
        try:
            key = base64.b64decode(secret.removeprefix(SIGNING_PREFIX), validate=True)
        except ValueError:
            key = b""
        if not key:
            raise ValueError(
                f"a webhook secret that begins with {SIGNING_PREFIX!r} must continue with base64,"
                " because the rest of the secret is the signing key"
            )
    return secret


# The event


def read_event(
    scheme: ProofScheme, headers: Mapping[str, str], body: bytes
) -> bytes | dict[str, str | bool]:
    """The event as the JSON of a `WebhookPayload`. If no handler is called for this event, returns
    the answer to the sender instead.

    Raises `NotAnEvent` if the body is not UTF-8. With the schemes `github`, `gitea` and `gitlab`,
    also raises `NotAnEvent` if the header with the event's name is missing, or if the body is not a
    push event in the sender's format.
    """
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise NotAnEvent(f"The body is not UTF-8: {error.reason}.") from error
    if scheme == "secret" or scheme == "standard-webhooks":
        return {"pong": True} if _is_ping(body) else body
    header, push_names = _EVENT_HEADERS[scheme]
    name = headers.get(header)
    if name is None:
        raise NotAnEvent(
            f"The header {header} is not set, but this handler takes only {scheme} events. Check"
            " the `proof` of the handler."
        )
    if name == "ping":
        return {"pong": True}
    if name not in push_names:
        return {"ignored": f"the {scheme} event {name!r} is not a push"}
    if body.startswith(_FORM_FIELD):
        # If a webhook has the content type `application/x-www-form-urlencoded`, GitHub and Gitea
        # send the JSON in this field of a form.
        value = body.removeprefix(_FORM_FIELD).partition(b"&")[0]
        body = unquote_to_bytes(value.replace(b"+", b" "))
    try:
        push = (_GitLabPush if scheme == "gitlab" else _GitHubPush).model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "body"
        raise NotAnEvent(f"not a {scheme} push event: {where}: {first['msg']}") from error
    return push.to_payload(scheme).model_dump_json().encode()


class _Scoped(BaseModel):
    scope: str = Field(validation_alias=AliasPath("event", "scope"))


def _is_ping(body: bytes) -> bool:
    """Whether the body is the event that a hub sends to test a webhook."""
    if PING.encode() not in body:
        return False
    try:
        return _Scoped.model_validate_json(body).scope == PING
    except ValidationError:
        return False  # the body is malformed; the handler's route will refuse it


class _Push(BaseModel):
    """What a push event says, whoever sends it."""

    ref: str
    before: str
    after: str
    id: int
    name: str
    web_url: str
    git_url: str
    default_branch: str | None = None
    is_private: bool

    def to_payload(self, sender: PushSender) -> WebhookPayload:
        update = UpdatedRef(
            ref=self.ref, oldSha=_sha_or_none(self.before), newSha=_sha_or_none(self.after)
        )
        return WebhookPayload(
            event=Event(action="update", scope="repo.content"),
            repo=Repo(
                type="dataset",
                name=self.name,
                id=f"{sender}:{self.id}",
                private=self.is_private,
                owner=ObjectId(id=self.name.rpartition("/")[0]),
                url=Url(web=self.web_url, api=self.git_url),
                headSha=update.newSha if self.ref == f"refs/heads/{self.default_branch}" else None,
            ),
            webhook=WebhookReference(id=sender, version=3),
            updatedRefs=(update,),
        )


class _GitHubPush(_Push):
    """A push event of GitHub. Gitea sends the same fields.

    https://docs.github.com/webhooks/webhook-events-and-payloads#push
    """

    id: int = Field(validation_alias=AliasPath("repository", "id"))
    name: str = Field(validation_alias=AliasPath("repository", "full_name"))
    web_url: str = Field(validation_alias=AliasPath("repository", "html_url"))
    git_url: str = Field(validation_alias=AliasPath("repository", "clone_url"))
    default_branch: str = Field(validation_alias=AliasPath("repository", "default_branch"))
    is_private: bool = Field(validation_alias=AliasPath("repository", "private"))


class _GitLabPush(_Push):
    """A push event of GitLab.

    https://docs.gitlab.com/user/project/integrations/webhook_events/#push-events
    """

    id: int = Field(validation_alias="project_id")
    name: str = Field(validation_alias=AliasPath("project", "path_with_namespace"))
    web_url: str = Field(validation_alias=AliasPath("project", "web_url"))
    git_url: str = Field(validation_alias=AliasPath("project", "git_http_url"))
    default_branch: str | None = Field(
        None, validation_alias=AliasPath("project", "default_branch")
    )
    is_private: bool = Field(validation_alias=AliasPath("project", "visibility_level"))

    @field_validator("is_private", mode="before")
    @classmethod
    def _is_private(cls, visibility_level: object) -> bool:
        return visibility_level != 20  # which means public


def _sha_or_none(sha: str) -> str | None:
    """The sha, or None if the sha consists of zeros. Senders write zeros instead of a commit if the
    ref did not exist before the push, or if the push has deleted the ref."""
    return sha if sha.strip("0") else None
