"""Stores what happened to repositories, and in the same transaction whom it must be told."""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sqlalchemy import Connection, delete, insert, select

from pipeline.hub import outbox, payloads, schema
from pipeline.hub.database import Database
from pipeline.hub.job_commits import made_by_jobs
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
    """Whether commits that only jobs made are told as well."""
    wake: Callable[[], None]
    """Called after a commit that left deliveries to send; from any thread."""

    def record_refs(self, repository: Repository, refs: Mapping[str, str]) -> list[RefChange]:
        """Compares `refs` with where the last stored events left them; one event per difference.

        The caller holds the repository's lock and read `refs` under it. When this returns, the
        events and their deliveries are on disk.
        """
        with self.database.read() as connection:
            known = _known_refs(connection, repository)
        changes = list(_changes(known, refs))
        if not changes:
            return []
        silent = self._silent(repository, changes, known)
        with self.database.write() as connection:
            for change in changes:
                self._store(
                    connection,
                    action="update",
                    scope="repo.content",
                    repository=repository,
                    head_sha=refs.get(DEFAULT_BRANCH),
                    change=change,
                    tells=change not in silent,
                )
                _remember(connection, repository, change)
        self.metrics.events.labels(scope="repo.content").inc(len(changes))
        self.wake()
        return changes

    def _silent(
        self, repository: Repository, changes: Iterable[RefChange], known: Mapping[str, str]
    ) -> list[RefChange]:
        if self.deliver_job_commits:
            return []
        silent = [one for one in changes if made_by_jobs(repository, one, set(known.values()))]
        for change in silent:
            logger.info("%s of %s: jobs made these commits", change.ref, repository.name)
        return silent

    def record(
        self,
        connection: Connection,
        repository: Repository,
        *,
        action: EventAction,
        scope: str = "repo",
        moved_to: Repository | None = None,
    ) -> None:
        """An event of the repository itself, within the caller's transaction.

        The caller calls `wake` after its commit.
        """
        head_sha = _known_refs(connection, repository).get(DEFAULT_BRANCH)
        self._store(
            connection,
            action=action,
            scope=scope,
            repository=repository,
            head_sha=head_sha,
            moved_to=moved_to,
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
        change: RefChange | None = None,
        moved_to: Repository | None = None,
        tells: bool = True,
    ) -> None:
        event_seq = _insert_event(
            connection, action=action, scope=scope, repository=repository, change=change
        )
        for webhook in list_webhooks(connection) if tells else ():
            if not webhook.wants(repository.name):
                continue
            payload = payloads.compose(
                action=action,
                scope=scope,
                repository=repository,
                webhook_id=webhook.id,
                hub_url=self.hub_url,
                head_sha=head_sha,
                change=change,
                moved_to=moved_to,
            )
            outbox.put(
                connection,
                webhook_id=webhook.id,
                event_seq=event_seq,
                payload=payload,
                not_before=webhook.probe_at or 0,
            )

    def ping(self, connection: Connection, webhook: StoredWebhook, about: Repository) -> str:
        """An event of the scope `ping`, told to `webhook` only; the id of its delivery.

        The caller calls `wake` after its commit.
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
    change: RefChange | None = None,
) -> int:
    inserted = connection.execute(
        insert(schema.events).values(
            repository_id=repository.id,
            type=repository.name.type,
            owner=repository.name.owner,
            name=repository.name.name,
            action=action,
            scope=scope,
            ref=change and change.ref,
            old_sha=change and change.old_sha,
            new_sha=change and change.new_sha,
            created_at=time.time(),
        )
    )
    assert inserted.inserted_primary_key is not None
    return int(inserted.inserted_primary_key[0])


def _known_refs(connection: Connection, repository: Repository) -> dict[str, str]:
    table = schema.refs
    rows = connection.execute(
        select(table.c.ref, table.c.sha).where(table.c.repository_id == repository.id)
    )
    return {row.ref: row.sha for row in rows}


def _changes(known: Mapping[str, str], now: Mapping[str, str]) -> Iterator[RefChange]:
    for ref in sorted(known.keys() | now.keys()):
        old, new = known.get(ref), now.get(ref)
        if old != new:
            yield RefChange(ref=ref, old_sha=old, new_sha=new)


def _remember(connection: Connection, repository: Repository, change: RefChange) -> None:
    table = schema.refs
    connection.execute(
        delete(table).where(table.c.repository_id == repository.id, table.c.ref == change.ref)
    )
    if change.new_sha is not None:
        connection.execute(
            insert(table).values(repository_id=repository.id, ref=change.ref, sha=change.new_sha)
        )
