"""Stores events, and in the same transaction a delivery for each webhook that gets the event."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, bindparam, delete, insert, select

from pipeline.hub import outbox, payloads, schema
from pipeline.hub.database import Database
from pipeline.hub.discussions import Discussion, DiscussionEvent
from pipeline.hub.job_commits import of_jobs
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.names import DEFAULT_BRANCH
from pipeline.hub.payloads import RefChange
from pipeline.hub.repositories import Repository
from pipeline.hub.webhook_store import StoredWebhook, list_webhooks
from receiver.payload import PING, EventAction

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EventLog:
    database: Database
    hub_url: str
    metrics: HubMetrics
    deliver_job_commits: bool = False
    """Whether webhooks also get the changes of refs whose new commits all come from jobs."""
    wake: Callable[[], None]
    """Tells the deliverer that there are new deliveries. Called after the database transaction that
    stored them, from any thread."""

    def record_refs(self, repository: Repository, refs: Mapping[str, str]) -> list[RefChange]:
        """Compares `refs` with the refs as they were at the last event. Stores one event with all
        changes, because one push may move several refs, and returns the changes.

        The caller holds the repository's lock and read `refs` under it. When this returns, the
        event and its deliveries are on disk.
        """
        with self.database.read() as connection:
            known = known_refs(connection, repository)
        changes = list(_changes(known, refs))
        if not changes:
            return []
        told = self._told(repository, changes, known)
        with self.database.write() as connection:
            self._store(
                connection,
                action="update",
                scope="repo.content",
                repository=repository,
                head_sha=refs.get(DEFAULT_BRANCH),
                changes=changes,
                told=told,
            )
            remember(connection, repository, changes)
        self.metrics.events.labels(scope="repo.content").inc()
        self.wake()
        return changes

    def _told(
        self, repository: Repository, changes: Sequence[RefChange], known: Mapping[str, str]
    ) -> Sequence[RefChange]:
        """The changes that webhooks get."""
        if self.deliver_job_commits:
            return changes
        silent = of_jobs(repository, changes, set(known.values()))
        for change in silent:
            logger.info(
                "%s of %s: no webhook gets this change, because jobs made all its commits",
                *(change.ref, repository.name),
            )
        return [change for change in changes if change not in silent]

    def record(
        self,
        connection: Connection,
        repository: Repository,
        *,
        action: EventAction,
        scope: str = "repo",
        moved_to: Repository | None = None,
    ) -> None:
        """Stores an event of the repository itself, such as its deletion, in the caller's
        transaction. After this transaction, the caller calls `wake`.
        """
        head_sha = known_refs(connection, repository).get(DEFAULT_BRANCH)
        self._store(
            connection,
            action=action,
            scope=scope,
            repository=repository,
            head_sha=head_sha,
            moved_to=moved_to,
        )
        self.metrics.events.labels(scope=scope).inc()

    def record_discussion(
        self,
        connection: Connection,
        repository: Repository,
        discussion: Discussion,
        comment: DiscussionEvent | None,
        *,
        action: EventAction,
    ) -> None:
        """Stores an event of a discussion, as `record` does. `comment` is the first comment of a
        new discussion, else None."""
        self._record_talk(connection, repository, discussion, comment, action, "discussion")

    def record_comment(
        self,
        connection: Connection,
        repository: Repository,
        discussion: Discussion,
        comment: DiscussionEvent,
        *,
        action: EventAction,
    ) -> None:
        """Stores an event of a comment, as `record` does."""
        self._record_talk(connection, repository, discussion, comment, action, "discussion.comment")

    def _record_talk(
        self,
        connection: Connection,
        repository: Repository,
        discussion: Discussion,
        comment: DiscussionEvent | None,
        action: EventAction,
        scope: str,
    ) -> None:
        self._store(
            connection,
            action=action,
            scope=scope,
            repository=repository,
            head_sha=None,
            discussion=discussion,
            comment=comment,
        )
        self.metrics.events.labels(scope=scope).inc()

    def _store(
        self,
        connection: Connection,
        *,
        action: EventAction,
        scope: str,
        repository: Repository,
        head_sha: str | None,
        changes: Sequence[RefChange] = (),
        told: Sequence[RefChange] = (),
        moved_to: Repository | None = None,
        discussion: Discussion | None = None,
        comment: DiscussionEvent | None = None,
    ) -> None:
        """Stores the event with all its `changes`, and a delivery per webhook with the changes in
        `told`. If there are changes and none of them is in `told`, no webhook gets the event."""
        event_seq = _insert_event(
            connection, action=action, scope=scope, repository=repository, changes=changes
        )
        for webhook in list_webhooks(connection) if told or not changes else ():
            if not webhook.wants(repository.name, "repo" if discussion is None else "discussion"):
                continue
            payload = payloads.compose(
                action=action,
                scope=scope,
                repository=repository,
                webhook_id=webhook.id,
                hub_url=self.hub_url,
                head_sha=head_sha,
                changes=told,
                moved_to=moved_to,
                discussion=discussion,
                comment=comment,
            )
            outbox.put(
                connection,
                webhook_id=webhook.id,
                event_seq=event_seq,
                payload=payload,
                not_before=webhook.probe_at or 0,
            )

    def ping(self, connection: Connection, webhook: StoredWebhook, about: Repository) -> str:
        """Stores an event of the scope `ping` that only `webhook` gets. Returns the id of its
        delivery. After its transaction, the caller calls `wake`.
        """
        event_seq = _insert_event(connection, action="update", scope=PING, repository=about)
        payload = payloads.compose(
            action="update",
            scope=PING,
            repository=about,
            webhook_id=webhook.id,
            hub_url=self.hub_url,
        )
        return outbox.put(connection, webhook_id=webhook.id, event_seq=event_seq, payload=payload)


def _insert_event(
    connection: Connection,
    *,
    action: EventAction,
    scope: str,
    repository: Repository,
    changes: Sequence[RefChange] = (),
) -> int:
    inserted = connection.execute(
        insert(schema.events).values(
            repository_id=repository.id,
            type=repository.name.type,
            owner=repository.name.owner,
            name=repository.name.name,
            action=action,
            scope=scope,
            updated_refs=[asdict(change) for change in changes],
            created_at=time.time(),
        )
    )
    assert inserted.inserted_primary_key is not None
    return int(inserted.inserted_primary_key[0])


def known_refs(connection: Connection, repository: Repository) -> dict[str, str]:
    """The sha of each ref at its last event, by the ref's full name."""
    table = schema.refs
    rows = connection.execute(
        select(table.c.ref, table.c.sha).where(table.c.repository_id == repository.id)
    )
    return {row.ref: row.sha for row in rows}


def _changes(known: Mapping[str, str], now: Mapping[str, str]) -> Iterator[RefChange]:
    # The default branch comes first, for receivers that read only the first ref.
    for ref in sorted(known.keys() | now.keys(), key=lambda ref: (ref != DEFAULT_BRANCH, ref)):
        old, new = known.get(ref), now.get(ref)
        if old != new:
            yield RefChange(ref=ref, old_sha=old, new_sha=new)


def remember(connection: Connection, repository: Repository, changes: Sequence[RefChange]) -> None:
    """Stores the new shas of these refs. The next push is compared with them."""
    table = schema.refs
    gone = delete(table).where(
        table.c.repository_id == repository.id, table.c.ref == bindparam("moved")
    )
    connection.execute(gone, [{"moved": change.ref} for change in changes])
    rows = [
        {"repository_id": repository.id, "ref": change.ref, "sha": change.new_sha}
        for change in changes
        if change.new_sha is not None
    ]
    if rows:
        connection.execute(insert(table), rows)
