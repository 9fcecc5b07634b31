"""The webhooks that the hub keeps: who is told of what. Their secrets are stored encrypted."""

import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Literal, TypedDict
from urllib.parse import urlsplit

from cryptography.fernet import Fernet, InvalidToken
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection, Row, delete, insert, select, update

from pipeline.hub.errors import HubError, WebhookNotFound
from pipeline.hub.names import RepositoryName
from pipeline.hub.schema import webhooks as table

Domain = Literal["repo", "discussion"]
DEFAULT_DOMAINS: tuple[Domain, ...] = ("repo", "discussion")


def _is_http(url: str) -> str:
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises where it is no number
    except ValueError as error:
        raise ValueError(f"{url!r} is no URL: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} must start with http:// or https:// and name a host")
    return url


HttpUrl = Annotated[str, AfterValidator(_is_http)]
# It travels in a header, where nothing but visible ASCII arrives unchanged.
Secret = Annotated[str, StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=512)]


class Watched(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    type: Literal["bucket", "dataset", "model", "org", "space", "user"]
    name: str = Field(min_length=1)

    def covers(self, repository: RepositoryName) -> bool:
        if self.type in ("org", "user"):
            return self.name == repository.owner
        return (self.type, self.name) == (repository.type, repository.id)


class _Request(BaseModel):
    # The real client also sends keys of other webhook kinds; those are refused by name.
    model_config = ConfigDict(frozen=True, extra="ignore")

    jobSourceId: str | None = None
    secrets: dict[str, str] | None = None
    secret: Secret | Literal[""] | None = None


class CreateWebhook(_Request):
    url: HttpUrl | None = None
    watched: tuple[Watched, ...] = Field(min_length=1)
    domains: tuple[Domain, ...] = DEFAULT_DOMAINS


class UpdateWebhook(_Request):
    url: HttpUrl | None = None
    watched: tuple[Watched, ...] = ()
    """The client sends an empty list for "leave it alone", so that is what it means here."""
    domains: tuple[Domain, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Webhook:
    id: str
    url: str
    watched: tuple[Watched, ...]
    domains: tuple[Domain, ...]
    encrypted_secret: bytes | None
    disabled: bool

    def wants(self, repository: RepositoryName) -> bool:
        """Whether it is told of `repository`; the hub has events of the domain `repo` only."""
        return (
            not self.disabled
            and "repo" in self.domains
            and any(item.covers(repository) for item in self.watched)
        )


class WebhookJson(TypedDict, total=False):
    id: str
    url: str
    watched: list[dict[str, str]]
    domains: list[Domain]
    disabled: bool
    secret: str


def as_json(webhook: Webhook) -> WebhookJson:
    """As the client parses it. The secret is not in it: only the answer to a creation has it."""
    return {
        "id": webhook.id,
        "url": webhook.url,
        "watched": [item.model_dump() for item in webhook.watched],
        "domains": list(webhook.domains),
        "disabled": webhook.disabled,
    }


class SecretBox:
    """Encrypts the secrets at rest (Fernet: AES-128-CBC and HMAC-SHA256)."""

    def __init__(self, key: bytes) -> None:
        try:
            self._fernet = Fernet(key)
        except ValueError as error:
            raise HubError(
                f"The hub's secret key is no Fernet key ({error}): "
                "give 32 random bytes in URL-safe base64."
            ) from None

    def seal(self, secret: str | None) -> bytes | None:
        return self._fernet.encrypt(secret.encode()) if secret else None

    def open(self, webhook: Webhook) -> str | None:
        """Raises HubError where the secret was encrypted under another key."""
        if webhook.encrypted_secret is None:
            return None
        try:
            return self._fernet.decrypt(webhook.encrypted_secret).decode()
        except InvalidToken:
            raise HubError(
                f"The secret of webhook {webhook.id} was stored under another key: "
                "set it again, or start the hub with the old key."
            ) from None


def list_webhooks(connection: Connection) -> list[Webhook]:
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id))
    return [_record(row) for row in rows]


def get_webhook(connection: Connection, id: str) -> Webhook:
    row = connection.execute(select(table).where(table.c.id == id)).one_or_none()
    if row is None:
        raise WebhookNotFound(f"No webhook {id!r} here; list them with `hf webhooks ls`.")
    return _record(row)


def create_webhook(connection: Connection, request: CreateWebhook, box: SecretBox) -> Webhook:
    id = secrets.token_hex(12)
    connection.execute(
        insert(table).values(
            id=id,
            url=request.url,
            watched=[item.model_dump() for item in request.watched],
            domains=list(request.domains),
            encrypted_secret=box.seal(request.secret),
            disabled=False,
            created_at=time.time(),
        )
    )
    return get_webhook(connection, id)


def update_webhook(
    connection: Connection, id: str, request: UpdateWebhook, box: SecretBox
) -> Webhook:
    """Changes what the request names. An empty secret takes the secret away."""
    get_webhook(connection, id)
    changes: dict[str, object] = {}
    if request.url is not None:
        changes["url"] = request.url
    if request.watched:
        changes["watched"] = [item.model_dump() for item in request.watched]
    if request.domains is not None:
        changes["domains"] = list(request.domains)
    if request.secret is not None:
        changes["encrypted_secret"] = box.seal(request.secret)
    if changes:
        connection.execute(update(table).where(table.c.id == id).values(changes))
    return get_webhook(connection, id)


def set_disabled(connection: Connection, id: str, disabled: bool) -> Webhook:
    get_webhook(connection, id)
    connection.execute(update(table).where(table.c.id == id).values(disabled=disabled))
    return get_webhook(connection, id)


def delete_webhook(connection: Connection, id: str) -> None:
    get_webhook(connection, id)
    connection.execute(delete(table).where(table.c.id == id))


def _record(row: Row[tuple[object, ...]]) -> Webhook:
    return Webhook(
        id=row.id,
        url=row.url,
        watched=tuple(Watched(**item) for item in row.watched),
        domains=tuple(row.domains),
        encrypted_secret=row.encrypted_secret,
        disabled=row.disabled,
    )
