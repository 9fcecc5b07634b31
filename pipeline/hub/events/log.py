"""Stores events, and in the same transaction a delivery for each webhook that gets the event. A ref
that changed becomes an event here and nowhere else.

Webhooks do not get a change whose new commits were all made by jobs. Otherwise the commit of a job
could start the job again. The hub knows such a commit by the mail domain of its committer, which
each job has in its environment. If a job makes a commit without this environment, the commit's
message can end with the trailer `Pipeline-Job: <job id>` instead.
"""

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from sqlalchemy import Connection, insert

from jobs.environment import COMMITTER_DOMAIN
from pipeline.hub import schema
from pipeline.hub.database import Database
from pipeline.hub.discussions.store import Discussion, DiscussionEvent
from pipeline.hub.errors import HubError
from pipeline.hub.events.payloads import compose
from pipeline.hub.git.process import git, lines_of
from pipeline.hub.metrics import HubMetrics
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import (
    RefChange,
    known_refs,
    peeled_refs,
    read_refs,
    ref_changes,
    remember,
    retain_unreachable,
)
from pipeline.hub.repositories.store import Repository
from pipeline.hub.webhooks import outbox
from pipeline.hub.webhooks.store import StoredWebhook, list_webhooks
from receiver.payload import PING, EventAction

logger = logging.getLogger(__name__)

TRAILER = "Pipeline-Job"


@dataclass(frozen=True, kw_only=True)
class EventLog:
    database: Database
    hub_url: str
    metrics: HubMetrics
    deliver_job_commits: bool = False
    """Whether webhooks also get the changes of refs whose new commits all come from jobs."""
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
        silent = _of_jobs(repository, changes, set(known.values()))
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
        """Stores an event of a discussion in the caller's transaction. `comment` is the first
        comment of a new discussion, else None. After the transaction, the caller calls `wake`."""
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
        """Stores an event of a comment in the caller's transaction. After the transaction, the
        caller calls `wake`."""
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
        """Stores the event with all its `changes`, and a delivery for each webhook. A delivery has
        only the changes in `told`. If there are changes but `told` is empty, no webhook gets the
        event."""
        event_seq = _insert_event(
            connection, action=action, scope=scope, repository=repository, changes=changes
        )
        for webhook in list_webhooks(connection) if told or not changes else ():
            if not webhook.wants(repository.name, "repo" if discussion is None else "discussion"):
                continue
            payload = compose(
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
            )

    def ping(self, connection: Connection, webhook: StoredWebhook, about: Repository) -> str:
        """Stores, in the caller's transaction, an event of the scope `ping` that only `webhook`
        gets. Returns the id of its delivery. After the transaction, the caller calls `wake`.
        """
        event_seq = _insert_event(connection, action="update", scope=PING, repository=about)
        payload = compose(
            action="update",
            scope=PING,
            repository=about,
            webhook_id=webhook.id,
            hub_url=self.hub_url,
        )
        return outbox.put(connection, webhook_id=webhook.id, event_seq=event_seq, payload=payload)


def record_ref_changes(repository: Repository, log: EventLog) -> list[RefChange]:
    """Stores one event with all refs that changed since the last event, and returns these changes.
    Keeps the commits that were removed from their refs.

    The caller holds the repository's lock. When this returns, the event is on disk.
    """
    refs = read_refs(repository)
    retain_unreachable(repository, log.database, refs)
    return log.record_refs(repository, refs)


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


def _of_jobs(
    repository: Repository, changes: Sequence[RefChange], known: Collection[str]
) -> list[RefChange]:
    """The changes whose new commits were all made by jobs. `known` are the shas that the refs had
    before. A commit is new if none of them leads to it."""
    news = {change.ref: change.new_sha for change in changes if change.new_sha is not None}
    try:
        only_jobs = _made_by_jobs(repository, news.values(), known)
        if not any(only_jobs.values()):
            return []
        # An annotated tag has a sha of its own, which is not that of its commit.
        commits = news | {
            f"refs/tags/{tag}": commit for tag, commit in peeled_refs(repository, "refs/tags/")
        }
    except HubError as error:
        # The cause is a tag of a file, or a damaged repository. It is then not known who made the
        # commits, so webhooks get the changes.
        logger.warning(
            "cannot find out who made the new commits of %s, so webhooks get them: %s",
            *(repository.name, error),
        )
        return []
    return [one for one in changes if one.ref in news and only_jobs.get(commits[one.ref])]


def _made_by_jobs(
    repository: Repository, shas: Iterable[str], known: Collection[str]
) -> dict[str, bool]:
    """For each commit that one of `shas` leads to, and none of `known`: whether jobs made this
    commit and all of these commits before it."""
    revisions = "".join(f"{sha}\n" for sha in (*shas, *(f"^{sha}" for sha in known)))
    lines = git(
        repository.folder,
        *("log", "--ignore-missing", "--topo-order", "--reverse", "--stdin"),
        f"--format=%H %P%x09%ce%x09%(trailers:key={TRAILER},valueonly,unfold,separator=%x2C)",
        stdin=revisions.encode(),
    )
    only_jobs: dict[str, bool] = {}
    for line in lines_of(lines):  # parents come before their children
        shas_of_commit, _, maker = line.partition("\t")
        sha, *parents = shas_of_commit.split()
        only_jobs[sha] = _is_of_job(maker) and all(only_jobs.get(one, True) for one in parents)
    return only_jobs


def _is_of_job(maker: str) -> bool:
    committer, _, trailer = maker.partition("\t")
    return committer.endswith(f"@{COMMITTER_DOMAIN}") or bool(trailer.strip())
