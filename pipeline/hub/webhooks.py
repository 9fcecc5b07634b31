"""Stores the webhooks, with their secrets encrypted, and their deliveries: one queue for each
webhook, the oldest event first. `deliveries.py` sends them.

A delivery is `pending` until a 2xx answer makes it `delivered`, or until its last attempt has
failed, which makes it `dead`. Only the head of a queue is sent: its event is the oldest that is
pending. While the head waits for its next attempt, all later deliveries wait too, so a receiver
sees the events in their order.

If a webhook's receiver has failed for some time, the webhook is `suspended`. This is only what
people are told: the head is tried as before, and its first success ends the suspension.

The database does not say which delivery is being sent. So if the hub is killed during an attempt,
it sends the delivery again after its restart. A receiver gets each delivery at least once.
"""

import time
import uuid
from dataclasses import dataclass
from typing import Any, Literal

import httpx
from pydantic import ConfigDict
from sqlalchemy import Connection, Row, delete, exists, insert, select, text, update

from jobs.job import unseal
from pipeline.hub.database import Database, deliveries, events
from pipeline.hub.database import webhooks as table
from pipeline.hub.errors import BadRequest, NotFound
from pipeline.hub.http_json import Json, iso_time
from pipeline.hub.repositories import RepositoryName
from pipeline.hub.settings import HubSettings
from receiver.webhooks import Domain, WatchedItem, WebhookStatus

SECRET = "WEBHOOK_SECRET"
"""The name of the encrypted secret: a copy of a job gets it as this environment variable."""


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


@dataclass(frozen=True, kw_only=True)
class StoredWebhook:
    id: str
    url: str | None
    job_id: str | None
    """The job to copy for each delivery. None if the deliveries are posted to `url` instead."""
    watched: tuple[HubWatchedItem, ...]
    domains: tuple[Domain, ...]
    encrypted_secret: str | None
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

    def secret(self, key: bytes) -> str | None:
        """None if the webhook has no secret. Raises SealBroken if the key is wrong."""
        sealed = self.encrypted_secret
        return None if sealed is None else unseal(sealed, key)[SECRET]

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


def change_webhook(
    connection: Connection, webhook: StoredWebhook, **values: object
) -> StoredWebhook:
    changed = update(table).where(table.c.id == webhook.id).values(values).returning(table)
    return _from_row(connection.execute(changed).one())


def get_enabled_webhook(connection: Connection, id: str) -> StoredWebhook:
    webhook = get_webhook(connection, id)
    if webhook.disabled:
        raise BadRequest(f"Webhook {id} is disabled and sends nothing: enable it first.")
    return webhook


def _from_row(row: Row[tuple[object, ...]]) -> StoredWebhook:
    watched = tuple(HubWatchedItem(**item) for item in row.watched)
    return StoredWebhook(**row._asdict() | {"watched": watched, "domains": tuple(row.domains)})


ANSWER_CHARACTERS = 1000
"""How many characters of a receiver's answer are stored."""

# This has no bound value, because SQLite uses the index `deliveries_pending` only for exactly this
# condition.
PENDING = text("deliveries.status = 'pending'")


@dataclass(frozen=True, kw_only=True)
class Due:
    """The head of a webhook's queue."""

    id: str
    payload: str
    attempt: int
    """The number of attempts so far. Attempts whose connection was refused do not count."""
    queued_at: float
    replay_of: str | None = None


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended. With an answer, `response_status` and `response_head` are set;
    otherwise `error` is set."""

    started_at: float
    milliseconds: float
    response_status: int | None = None
    response_head: str | None = None
    error: str | None = None
    refused: bool = False
    """Whether the receiver is on this machine and refused the connection. It may be starting."""

    @property
    def succeeded(self) -> bool:
        return self.response_status is not None and 200 <= self.response_status < 300


DeliveryStatus = Literal["pending", "delivered", "dead"]

GONE = 410
"""With this status, a receiver says that it wants no more deliveries:
https://www.standardwebhooks.com"""

NO_FAILURES = dict.fromkeys(("failing_since", "suspended_at", "retry_at"))
"""Forgets the failures of a webhook: it is not suspended, and the head of its queue is due now."""


def queues(connection: Connection) -> dict[str, float]:
    """The ids of the webhooks that have a delivery to send, and when the head of each queue is due
    (0: at once)."""
    pending = exists().where(deliveries.c.webhook_id == table.c.id, PENDING)
    rows = connection.execute(
        select(table.c.id, table.c.retry_at).where(table.c.disabled.is_(False), pending)
    )
    return {row.id: row.retry_at or 0.0 for row in rows}


def oldest_pending(connection: Connection, webhook_id: str) -> tuple[Due, StoredWebhook] | None:
    """The head of the webhook's queue. None if the queue is empty, or if the webhook is disabled or
    does not exist."""
    names = ("id", "payload", "attempt", "queued_at", "replay_of")
    queue = select(*(deliveries.c[name] for name in names)).where(
        deliveries.c.webhook_id == webhook_id, PENDING
    )
    first = queue.order_by(deliveries.c.event_seq, deliveries.c.created_at).limit(1)
    row = connection.execute(first).one_or_none()
    webhook = find_webhook(connection, webhook_id)
    if row is None or webhook is None or webhook.disabled:
        return None
    return Due(**row._asdict()), webhook


def settle(
    connection: Connection,
    due: Due,
    webhook: StoredWebhook,
    attempt: Attempt,
    settings: HubSettings,
) -> tuple[DeliveryStatus | None, WebhookStatus | None]:
    """Stores how an attempt ended, and plans the next one. `webhook` is the webhook as it was
    before the attempt.

    Returns the state of the delivery (None if it was deleted with its webhook during the attempt),
    and the new state of the webhook if the attempt has changed it, else None.
    """
    made = due.attempt + (not attempt.refused)
    is_last = not attempt.refused and made >= len(settings.delivery_schedule_seconds)
    status: DeliveryStatus = "pending"
    if attempt.succeeded:
        status = "delivered"
    elif is_last and attempt.response_status != GONE:
        status = "dead"
    # If a person replayed the delivery during the attempt, it has another `queued_at` and starts
    # from the beginning. Then the end of this attempt does not change the delivery.
    connection.execute(
        update(deliveries)
        .where(deliveries.c.id == due.id, deliveries.c.queued_at == due.queued_at)
        .values(
            status=status,
            attempt=made,
            last_attempt_at=attempt.started_at,
            response_status=attempt.response_status,
            response_head=attempt.response_head,
            error=attempt.error,
            milliseconds=attempt.milliseconds,
        )
    )
    stored = connection.scalar(select(deliveries.c.status).where(deliveries.c.id == due.id))
    before = find_webhook(connection, webhook.id)
    # If a person enabled the webhook, changed it or replayed a delivery during the attempt, a
    # failure of this attempt says nothing about the webhook in its present state.
    if before is None or not (attempt.succeeded or before == webhook):
        return stored, None
    if attempt.succeeded:
        after = change_webhook(connection, before, **NO_FAILURES)
    elif attempt.response_status == GONE:
        after = change_webhook(connection, before, **NO_FAILURES, disabled=True)
    else:
        now, since = time.time(), before.failing_since or attempt.started_at
        failing_seconds = attempt.started_at - since
        if attempt.refused:
            # The receiver is probably starting. Wait half a second, and then as long as it has
            # refused: the wait doubles.
            wait = min(max(failing_seconds, 0.5), settings.refused_seconds)
        else:
            # After the last attempt of the head, the next delivery follows at once.
            wait = 0 if is_last else settings.delivery_schedule_seconds[made]
        changes = {"failing_since": since, "retry_at": now + wait}
        if failing_seconds >= settings.suspend_after_seconds and before.suspended_at is None:
            changes["suspended_at"] = now
        after = change_webhook(connection, before, **changes)
    return stored, None if after.status == before.status else after.status


def add_delivery(
    connection: Connection,
    webhook_id: str,
    event_seq: int,
    payload: str,
    *,
    replay_of: str | None = None,
) -> str:
    """Adds a delivery to the webhook's queue, which `Deliverer` reads after each write. Returns
    its id."""
    id, now = str(uuid.uuid4()), time.time()
    connection.execute(
        insert(deliveries).values(
            id=id,
            webhook_id=webhook_id,
            event_seq=event_seq,
            payload=payload,
            status="pending",
            attempt=0,
            created_at=now,
            queued_at=now,
            replay_of=replay_of,
        )
    )
    return id


def replay(connection: Connection, delivery_id: str, *, force: bool = False) -> Json:
    """Puts a delivery into the queue again, counts its attempts from zero, and makes the head of
    the queue due now. Raises NotFound, and BadRequest if the webhook is disabled.

    The delivery keeps its id. So a receiver that has already handled it only repeats its first
    answer. With `force`, this makes a new delivery with a new id, which the receiver handles again.
    The `replay_of` of the new delivery is the old id.
    """
    old = _find(connection, delivery_id)
    webhook = get_enabled_webhook(connection, old.webhook_id)
    change_webhook(connection, webhook, retry_at=None)
    if force:
        delivery_id = add_delivery(
            connection, webhook.id, old.event_seq, old.payload, replay_of=delivery_id
        )
    else:
        again = {"status": "pending", "attempt": 0, "queued_at": time.time()}
        connection.execute(update(deliveries).where(deliveries.c.id == delivery_id).values(again))
    return get_delivery(connection, delivery_id)


_LISTED = select(
    deliveries,
    events.c.action,
    events.c.scope,
    events.c.updated_refs,
    (events.c.type + ":" + events.c.owner + "/" + events.c.name).label("repository"),
).join(events, events.c.seq == deliveries.c.event_seq)


def list_deliveries(
    connection: Connection,
    webhook_id: str | None = None,
    *,
    status: DeliveryStatus | None = None,
    limit: int,
) -> list[Json]:
    """At most `limit` deliveries, those of the newest events first. `webhook_id` None means every
    webhook, and `status` None means every state."""
    newest = (deliveries.c.event_seq.desc(), deliveries.c.created_at.desc())
    query = _LISTED.order_by(*newest).limit(limit)
    if webhook_id is not None:
        query = query.where(deliveries.c.webhook_id == webhook_id)
    if status is not None:
        query = query.where(deliveries.c.status == status)
    return [_as_json(row) for row in connection.execute(query)]


def get_delivery(connection: Connection, delivery_id: str) -> Json:
    """Raises NotFound."""
    return _as_json(_find(connection, delivery_id))


def _find(connection: Connection, delivery_id: str) -> Any:
    row = connection.execute(_LISTED.where(deliveries.c.id == delivery_id)).one_or_none()
    if row is None:
        raise NotFound(
            f"There is no delivery {delivery_id!r}: list the deliveries with `pipeline webhooks "
            "deliveries`."
        )
    return row


def _as_json(row: Any) -> Json:
    facts: Json = row._asdict()
    del facts["event_seq"], facts["queued_at"]
    # The fields of the first ref are also given at the top level, because most pushes move only one
    # ref.
    first = next(iter(row.updated_refs), dict.fromkeys(("ref", "old_sha", "new_sha")))
    tried = row.last_attempt_at and iso_time(row.last_attempt_at)
    return facts | first | {"created_at": iso_time(row.created_at), "last_attempt_at": tried}


def prune(database: Database, keep_days: float) -> None:
    """Removes deliveries that became delivered or dead more than `keep_days` days ago, and events
    that are older than this and have no delivery."""
    before = time.time() - 86400 * keep_days
    is_over = (deliveries.c.last_attempt_at < before) & (deliveries.c.status != "pending")
    told = exists().where(deliveries.c.event_seq == events.c.seq)
    with database.write() as connection:
        connection.execute(delete(deliveries).where(is_over))
        connection.execute(delete(events).where(events.c.created_at < before, ~told))
