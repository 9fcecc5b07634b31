"""Stores the webhooks, with their secrets encrypted, and checks what clients send about them.
Resolves the host of a webhook's URL, and refuses link-local, multicast and metadata addresses.

A metadata service gives the credentials of this machine to every process on it, so no webhook may
call one. Addresses of loopback and of private networks are allowed, because the receivers are
usually there.
"""

import asyncio
import ipaddress
import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal, get_args

import httpx
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints
from sqlalchemy import Connection, Row, delete, insert, select, update

from pipeline.hub.cipher import Cipher
from pipeline.hub.database import read_only
from pipeline.hub.database import webhooks as table
from pipeline.hub.errors import BadRequest, HubError, NotFound
from pipeline.hub.repositories import RepositoryName
from receiver.verify import check_signing_secret
from receiver.webhooks import Domain, WatchedItem, WebhookStatus

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Addresses of cloud metadata services that are not link-local.
_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "fd00:ec2::254",  # Amazon
        "fd00:ec2::23",  # Amazon, for pods of EKS
        "fd20:ce::254",  # Google
        "100.100.100.200",  # Alibaba
        "168.63.129.16",  # Azure
        "192.0.0.192",  # Oracle
    )
)
# Names are looked up in separate threads, because a name server that does not answer blocks a
# thread for half a minute.
_resolvers = ThreadPoolExecutor(64, thread_name_prefix="resolve")
_NAT64 = (ipaddress.IPv6Network("64:ff9b::/96"), ipaddress.IPv6Network("64:ff9b:1::/48"))


def is_forbidden(address: Address) -> bool:
    """Whether no webhook may call this address. An IPv6 address is also forbidden if it contains
    a forbidden IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(address in network for network in _NAT64):
            inner.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
        if any(each is not None and is_forbidden(each) for each in inner):
            return True
        # Remove the zone (`%eth0`): an address with a zone equals none in `_METADATA`.
        address = ipaddress.IPv6Address(int(address))
    return address.is_link_local or address.is_multicast or address in _METADATA


def check_literal(host: str) -> None:
    """Raises ValueError if `host` is an address, not a name, and no webhook may call it."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return
    if is_forbidden(address):
        raise ValueError(_refusal(host, address))


async def resolve(host: str, port: int) -> tuple[Address, ...]:
    """All addresses of `host`, which may also be an address, in the order in which to try them.

    Raises HubError if `host` has no address, or if any of its addresses is forbidden. A name
    that has a forbidden address cannot be trusted, even if its other addresses are allowed.
    """
    look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    try:
        answers = await asyncio.get_running_loop().run_in_executor(_resolvers, look_up)
    except (OSError, UnicodeError) as error:
        raise HubError(f"{host!r} has no address ({error}): check the URL.") from None
    found = tuple(ipaddress.ip_address(answer[4][0]) for answer in answers)
    for address in found:
        if is_forbidden(address):
            raise HubError(_refusal(host, address))
    return found


def _refusal(host: str, address: Address) -> str:
    leads = "is" if host == str(address) else f"leads to {address},"
    return f"{host} {leads} a link-local, multicast or metadata address: no webhook may call it"


def _is_http(url: str) -> str:
    try:
        parsed = httpx.URL(url)  # as a delivery reads it
        host = parsed.host
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(f"{url!r}: {error}") from None
    has_port = parsed.port is None or 0 < parsed.port < 65536
    # httpx writes a character that no host has as `%20`.
    if parsed.scheme not in ("http", "https") or not host or "%" in host or not has_port:
        raise ValueError(
            f"{url!r}: nothing can be posted there: write http://HOST:PORT/PATH, or https."
        )
    check_literal(host)
    return url


HttpUrl = Annotated[str, AfterValidator(_is_http)]
# Visible ASCII, because the secret is sent in a header, where other characters may be changed.
Secret = Annotated[
    str,
    StringConstraints(pattern=r"^[\x21-\x7e]+$", max_length=512),
    AfterValidator(check_signing_secret),
]


class HubWatchedItem(WatchedItem):
    """A repository, user or organization that a webhook watches, in a request to the hub. Unknown
    keys are refused."""

    model_config = ConfigDict(extra="forbid")

    def covers(self, repository: RepositoryName) -> bool:
        """Whether events of `repository` match this item. Names are compared without case, as
        everywhere on the hub."""
        if self.type in ("org", "user"):
            return self.name.lower() == repository.owner.lower()
        return self.is_for(repository)

    def is_for(self, repository: RepositoryName) -> bool:
        """Whether this item names the repository itself."""
        return (self.type, self.name.lower()) == (repository.type, repository.id.lower())

    def with_owner(self, owner: str) -> "HubWatchedItem":
        """The same item, but a repository's name without an owner gets `owner`."""
        if self.type in ("org", "user") or "/" in self.name:
            return self
        return self.model_copy(update={"name": f"{owner}/{self.name}"})


class WebhookRequest(BaseModel):
    """A request that creates or changes a webhook. A field that is left out changes nothing."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    url: HttpUrl | None = None
    jobSourceId: str | None = None
    """The id of the job of which the webhook starts copies, instead of calling a URL."""
    watched: tuple[HubWatchedItem, ...] = ()
    """Empty changes nothing, because `huggingface_hub` sends an empty list for no change."""
    domains: Annotated[tuple[Domain, ...], Field(min_length=1)] | None = None
    secret: Secret | Literal[""] | None = None
    """The secret that the receiver checks. Empty removes it."""
    secrets: object = None
    """The Hugging Face Hub gives them to the copies of the job; this hub refuses them."""


@dataclass(frozen=True, kw_only=True)
class StoredWebhook:
    id: str
    url: str | None
    job_id: str | None
    """The job to copy for each delivery. None if the deliveries are posted to `url` instead."""
    watched: tuple[HubWatchedItem, ...]
    domains: tuple[Domain, ...]
    encrypted_secret: bytes | None
    disabled: bool
    failing_since: float | None
    """The time of the first failed attempt since the last successful one. None if there is none."""
    suspended_at: float | None
    created_at: float
    retry_at: float | None
    """The head of the queue is sent at this time; at once if this is None."""

    @property
    def status(self) -> WebhookStatus:
        if self.disabled:
            return "disabled"
        return "enabled" if self.suspended_at is None else "suspended"

    @property
    def target(self) -> str:
        """What the webhook calls, for logs. The query and the user part of the URL are left out,
        because they may contain a secret."""
        if self.url is None:
            return f"job {self.job_id}"
        return str(httpx.URL(self.url).copy_with(userinfo=b"", query=None, fragment=None))

    def wants(self, repository: RepositoryName, domain: Domain) -> bool:
        """Whether the webhook gets events of this domain in `repository`."""
        return (
            not self.disabled
            and domain in self.domains
            and any(item.covers(repository) for item in self.watched)
        )


def list_webhooks(connection: Connection) -> list[StoredWebhook]:
    rows = connection.execute(select(table).order_by(table.c.created_at, table.c.id))
    return [_from_row(row) for row in rows]


def get_webhook(connection: Connection, id: str) -> StoredWebhook:
    webhook = find_webhook(connection, id)
    if webhook is None:
        raise NotFound(f"There is no webhook {id!r} here: list the webhooks with `hf webhooks ls`.")
    return webhook


def find_webhook(connection: Connection, id: str) -> StoredWebhook | None:
    row = connection.execute(select(table).where(table.c.id == id)).one_or_none()
    return None if row is None else _from_row(row)


def change_webhook(connection: Connection, webhook: StoredWebhook, **values: object) -> None:
    connection.execute(update(table).where(table.c.id == webhook.id).values(values))


def get_enabled_webhook(connection: Connection, id: str) -> StoredWebhook:
    webhook = get_webhook(connection, id)
    if webhook.disabled:
        raise BadRequest(f"Webhook {id} is disabled and sends nothing: enable it first.")
    return webhook


def create_webhook(
    connection: Connection, request: WebhookRequest, cipher: Cipher
) -> StoredWebhook:
    """Raises BadRequest if a field is missing."""
    if not request.watched:
        raise BadRequest("watched: a webhook must watch something.")
    if request.url is None and request.jobSourceId is None:
        raise BadRequest("url: a webhook needs the URL that it calls, or a job in `jobSourceId`.")
    id = secrets.token_hex(12)
    empty = {"watched": [], "domains": list(get_args(Domain)), "disabled": False}
    connection.execute(insert(table).values(id=id, created_at=time.time(), **empty))
    return update_webhook(connection, id, request, cipher)


def update_webhook(
    connection: Connection, id: str, request: WebhookRequest, cipher: Cipher
) -> StoredWebhook:
    """Changes the fields that the request names. Raises NotFound."""
    webhook = get_webhook(connection, id)
    changes: dict[str, object] = {}
    if request.url is not None:
        changes |= {"url": request.url, "job_id": None}
    elif request.jobSourceId is not None:
        changes |= {"url": None, "job_id": request.jobSourceId}
    if request.watched:
        changes["watched"] = [item.model_dump() for item in request.watched]
    if request.domains is not None:
        changes["domains"] = list(request.domains)
    if request.secret is not None:
        changes["encrypted_secret"] = cipher.encrypt(request.secret)
    if changes:
        change_webhook(connection, webhook, **changes)
    return get_webhook(connection, id)


def delete_webhook(connection: Connection, id: str) -> None:
    get_webhook(connection, id)
    connection.execute(delete(table).where(table.c.id == id))


def jobs_of_webhooks(path: Path) -> set[str]:
    """The ids of the jobs of which webhooks start copies. Reads the database file `path` of a hub,
    which may run in another process. Empty if there is no file. Raises HubError."""
    if not path.exists():
        return set()
    with read_only(path) as connection:
        rows = connection.execute("SELECT job_id FROM webhooks WHERE job_id IS NOT NULL")
        return {job_id for (job_id,) in rows}


def _from_row(row: Row[tuple[object, ...]]) -> StoredWebhook:
    watched = tuple(HubWatchedItem(**item) for item in row.watched)
    return StoredWebhook(**row._asdict() | {"watched": watched, "domains": tuple(row.domains)})
