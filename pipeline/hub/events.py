"""The events of the hub: what their receivers get, how they are stored, and how missing ones are
found.

An event is stored in one transaction with a delivery for each webhook that gets it. A ref that
changed becomes an event here and nowhere else.

Webhooks do not get a push whose new commits were all made by jobs. Otherwise the commit of a job
could start the job again. The hub knows such a commit by the mail domain of its committer, which
each job has in its environment.
"""

import hashlib
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from sqlalchemy import Connection, insert

from jobs.job import COMMITTER_DOMAIN
from jobs.spec import DEFAULT_BRANCH
from pipeline.hub.commits import first_commit
from pipeline.hub.database import Database
from pipeline.hub.database import events as table
from pipeline.hub.errors import HubError
from pipeline.hub.git import Signature, git, lines_of
from pipeline.hub.repositories import (
    RefChange,
    Repositories,
    Repository,
    RepositoryName,
    known_refs,
    read_refs,
    ref_changes,
    remember,
)
from pipeline.hub.webhooks import StoredWebhook, add_delivery, list_webhooks
from receiver.payload import EventAction
from receiver.webhooks import Domain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Event:
    """What happened to a repository."""

    action: EventAction
    scope: str = "repo"
    changes: Sequence[RefChange] = ()
    """The refs that a push moved."""
    more: Mapping[str, object] = field(default_factory=dict)
    """Further fields of the payload, such as `movedTo`."""

    @property
    def domain(self) -> Domain:
        return "discussion" if self.scope.startswith("discussion") else "repo"


def compose(
    event: Event, repository: Repository, webhook_id: str, hub_url: str, head_sha: str | None
) -> str:
    """The JSON of a `WebhookPayload`. As on the Hugging Face Hub, it has no key without a value."""
    name = repository.name
    web, api = f"{hub_url}/{name.path}", f"{hub_url}/api/{name.type}s/{name.id}"
    repo = {
        "type": name.type,
        "name": name.id,
        "id": repository.id,
        "private": True,
        "owner": {"id": owner_id(name.owner)},
        "url": {"web": web, "api": api},
    }
    if event.domain == "repo" and head_sha is not None:
        repo["headSha"] = head_sha
    document = {
        "event": {"action": event.action, "scope": event.scope},
        "repo": repo,
        "webhook": {"id": webhook_id, "version": 3},
        **event.more,
    }
    if event.changes:
        # Here a missing sha is written as null, which says that the ref is new or deleted.
        document["updatedRefs"] = [
            {"ref": change.ref, "oldSha": change.old_sha, "newSha": change.new_sha}
            for change in event.changes
        ]
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def owner_id(owner: str) -> str:
    """The id of an owner: 24 hex digits, as on the Hugging Face Hub. It is computed from the name,
    so an owner always has the same id."""
    return hashlib.sha256(owner.encode()).hexdigest()[:24]


@dataclass(frozen=True, kw_only=True)
class EventLog:
    database: Database
    hub_url: str

    def record(
        self,
        connection: Connection,
        repository: Repository,
        event: Event,
        *,
        webhooks: Sequence[StoredWebhook] | None = None,
    ) -> list[str]:
        """Stores the event in the caller's transaction, and a delivery for each of `webhooks`, by
        default for all that want it. Returns the ids of the deliveries."""
        stored = connection.execute(
            insert(table)
            .values(
                repository_id=repository.id,
                type=repository.name.type,
                owner=repository.name.owner,
                name=repository.name.name,
                action=event.action,
                scope=event.scope,
                updated_refs=[asdict(change) for change in event.changes],
                created_at=time.time(),
            )
            .returning(table.c.seq)
        )
        seq = stored.scalar_one()
        if webhooks is None:
            present = list_webhooks(connection)
            webhooks = [each for each in present if each.wants(repository.name, event.domain)]
        head_sha = known_refs(connection, repository).get(DEFAULT_BRANCH)
        ids = []
        for webhook in webhooks:
            payload = compose(event, repository, webhook.id, self.hub_url, head_sha)
            ids.append(add_delivery(connection, webhook.id, seq, payload))
        return ids


def create_repository(
    repositories: Repositories, log: EventLog, name: RepositoryName, author: Signature | None
) -> Repository:
    """Creates a repository with a first commit by `author`, or without a commit if it is None.
    Raises Conflict if the name is taken."""
    # Git works before the transaction, because no push can be stored during it.
    with repositories.prepared(name) as prepared:
        first = [] if author is None else [first_commit(prepared, author)]
        with log.database.write() as connection:
            repository = repositories.add(connection, prepared)
            if first:
                remember(connection, repository, first)
            log.record(connection, repository, Event(action="create"))
    return repository


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Compares the refs with the refs as they were at the last event. Stores one event with all
    changes, because one push may move several refs, and returns the changes.

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    refs = read_refs(repository)
    with log.database.read() as connection:
        known = known_refs(connection, repository)
    changes = list(ref_changes(known, refs))
    if not changes:
        return []
    # None: all that want it.
    webhooks: list[StoredWebhook] | None = [] if _made_by_jobs(repository, changes, known) else None
    with log.database.write() as connection:
        remember(connection, repository, changes)
        event = Event(action="update", scope="repo.content", changes=changes)
        log.record(connection, repository, event, webhooks=webhooks)
    return changes


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


async def reconcile_at_start(repositories: Repositories, log: EventLog) -> None:
    """Removes what a killed hub left unfinished, and the rows of repositories whose folder is
    missing. Then calls `reconcile`. It must end before the hub answers its first request."""
    repositories.remove_incomplete()
    known, on_disk = repositories.all(), repositories.on_disk()
    with log.database.write() as connection:
        for repository in known:
            if repository.folder not in on_disk:
                logger.warning(
                    "removing %s from the hub: its folder %s is missing",
                    *(repository.name, repository.folder),
                )
                log.record(connection, repository, Event(action="delete"))
                repositories.forget(connection, repository)
    for folder in on_disk.difference(repository.folder for repository in known):
        logger.warning("the hub ignores the folder %s: its database does not have it", folder)
    await reconcile(repositories, log)


async def reconcile(repositories: Repositories, log: EventLog) -> None:
    """Stores events for the changes of refs that did not come through the hub. Such changes are
    made by a person in a repository's folder, or by a git process whose hub was killed."""

    def record_or_complain(repository: Repository) -> None:
        try:
            record_ref_changes(repository, log)
        except HubError as error:
            # Only logged, because the hub must serve the other repositories.
            logger.error(
                "the refs of %s cannot be read (restore the files of damaged refs from a backup): "
                "%s",
                *(repository.name, error),
            )

    await repositories.for_each(record_or_complain)
