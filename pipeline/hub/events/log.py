"""Stores events, and in the same transaction a delivery for each webhook that gets the event. A ref
that changed becomes an event here and nowhere else.

Webhooks do not get a push whose new commits were all made by jobs. Otherwise the commit of a job
could start the job again. The hub knows such a commit by the mail domain of its committer, which
each job has in its environment.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, insert

from jobs.environment import COMMITTER_DOMAIN
from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.errors import HubError
from pipeline.hub.events.payloads import Event, compose
from pipeline.hub.git.process import git, lines_of
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import (
    RefChange,
    known_refs,
    read_refs,
    ref_changes,
    remember,
)
from pipeline.hub.repositories.store import Repository
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.store import StoredWebhook, list_webhooks
from receiver.webhooks import Domain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class EventLog:
    database: Database
    hub_url: str
    metrics: HubMetrics
    wake: Callable[[], None]
    """Tells the deliverer that there are new deliveries. It is called after the database
    transaction that stored the deliveries. Any thread may call it."""

    def record_refs(self, repository: Repository, refs: Mapping[str, str]) -> list[RefChange]:
        """Compares `refs` with the refs as they were at the last event. Stores one event with all
        changes, because one push may move several refs, and returns the changes.

        The caller holds the repository's lock, and has read `refs` under this lock. When this
        returns, the event and its deliveries are on disk.
        """
        with self.database.read() as connection:
            known = known_refs(connection, repository)
        changes = list(ref_changes(known, refs))
        if not changes:
            return []
        told: list[StoredWebhook] | None = None
        if _made_by_jobs(repository, changes, known):
            told = []
        with self.database.write() as connection:
            remember(connection, repository, changes)
            event = Event(action="update", scope="repo.content", changes=changes)
            self.record(connection, repository, event, webhooks=told)
        self.wake()
        return changes

    def record(
        self,
        connection: Connection,
        repository: Repository,
        event: Event,
        *,
        webhooks: Sequence[StoredWebhook] | None = None,
    ) -> list[str]:
        """Stores the event in the caller's transaction, and a delivery for each of `webhooks`, by
        default for all that want it. After the transaction, the caller calls `wake`. Returns the
        ids of the deliveries."""
        inserted = connection.execute(
            insert(schema.events).values(
                repository_id=repository.id,
                type=repository.name.type,
                owner=repository.name.owner,
                name=repository.name.name,
                action=event.action,
                scope=event.scope,
                updated_refs=[asdict(change) for change in event.changes],
                created_at=time.time(),
            )
        )
        assert inserted.inserted_primary_key is not None
        [seq] = inserted.inserted_primary_key
        self.metrics.events.labels(scope=event.scope).inc()
        if webhooks is None:
            domain: Domain = "repo" if event.discussion is None else "discussion"
            webhooks = [
                each for each in list_webhooks(connection) if each.wants(repository.name, domain)
            ]
        head_sha = known_refs(connection, repository).get(DEFAULT_BRANCH)
        ids = []
        for webhook in webhooks:
            payload = compose(
                event,
                repository,
                webhook_id=webhook.id,
                hub_url=self.hub_url,
                head_sha=head_sha,
            )
            ids.append(
                outbox.put(connection, webhook_id=webhook.id, event_seq=seq, payload=payload)
            )
        return ids


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Stores one event with all refs that changed since the last event, and returns these changes.

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    return log.record_refs(repository, read_refs(repository))


def _made_by_jobs(
    repository: Repository, changes: Sequence[RefChange], known: Mapping[str, str]
) -> bool:
    """Whether the changes bring new commits, and jobs made all of them. `known` are the refs as
    they were before; a commit is new if none of them leads to it."""
    news = [change.new_sha for change in changes if change.new_sha is not None]
    if len(news) < len(changes):
        return False
    revisions = "".join(f"{sha}\n" for sha in (*news, *(f"^{sha}" for sha in known.values())))
    try:
        lines = git(
            repository.folder,
            *("log", "--ignore-missing", "--stdin", "--format=%ce"),
            stdin=revisions.encode(),
        )
    except HubError as error:
        # The cause is a tag of a file, or a damaged repository. It is then not known who made the
        # commits, so webhooks get the changes.
        logger.warning(
            "cannot find out who made the new commits of %s, so webhooks get them: %s",
            *(repository.name, error),
        )
        return False
    committers = lines_of(lines)
    if not committers or not all(each.endswith(f"@{COMMITTER_DOMAIN}") for each in committers):
        return False
    logger.info("no webhook gets a push to %s: jobs made its commits", repository.name)
    return True
