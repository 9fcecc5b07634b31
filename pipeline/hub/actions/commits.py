"""Makes the commits of the API, on a branch or on a new pull request, and stores their events. The
caller holds the repository's lock, and wakes the deliverer afterwards (`EventLog.wake`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.hub.actions.discussions import check_takes_commits, open_pull_request
from pipeline.hub.commits.body import CommitBody
from pipeline.hub.commits.changes import planned_changes
from pipeline.hub.commits.checks import check_changes
from pipeline.hub.commits.fast_import import NewCommit, first_commit, import_commit, make_commit
from pipeline.hub.contents.history import read_commit, resolve_revision
from pipeline.hub.discussions.store import MAX_TITLE, OPEN, list_discussions
from pipeline.hub.errors import RevisionNotFound
from pipeline.hub.events.log import EventLog, record_ref_changes
from pipeline.hub.git.process import PULL_REQUEST_PREFIX
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import RefChange, read_refs, remember
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens.auth import Identity, signature


@dataclass(frozen=True, kw_only=True)
class MadeCommit:
    sha: str
    changes: Sequence[RefChange]
    """The changes about which the hub may have remarks for the client."""
    pull_request: int | None = None


def begin(log: EventLog, repository: Repository, identity: Identity) -> None:
    """Makes the first commit if the repository has no commit. On the Hugging Face Hub every
    repository has a commit, and clients such as `Dataset.push_to_hub` fail without it. No event is
    stored, because the first commit brings no data."""
    if read_refs(repository):
        return
    first = first_commit(repository, signature(identity))
    with log.database.write() as connection:
        remember(connection, repository, [first])


def commit_to_branch(
    log: EventLog, repository: Repository, identity: Identity, revision: str, body: CommitBody
) -> MadeCommit:
    ref, head = find_branch(repository, revision)
    if ref.startswith(PULL_REQUEST_PREFIX):
        check_takes_commits(log, repository, ref)
    sha = make_commit(repository, ref, head, _new_commit(repository, head, body, identity))
    return MadeCommit(sha=sha, changes=() if sha == head else record_ref_changes(repository, log))


def commit_to_pull_request(
    log: EventLog, repository: Repository, identity: Identity, revision: str, body: CommitBody
) -> MadeCommit:
    """Makes the commit on a new pull request. The commit's parent is the commit that the client
    names, or else the head of the branch."""
    base, head = find_branch(repository, revision, or_pull_request=False)
    parent = body.header.parentCommit
    start = head if parent is None else resolve_revision(repository, parent)
    new = _new_commit(repository, start, body, identity)
    check_changes(new.changes, repository, start)
    sha = import_commit(repository, start, new)
    earlier = _opened_before(log, repository, identity, base, sha)
    if earlier is not None:
        return earlier
    opened = open_pull_request(
        log,
        repository,
        identity,
        title=body.header.summary[:MAX_TITLE],
        text=body.header.description or body.header.summary,
        status="open",
        base=base,
        head=sha,
    )
    change = RefChange(ref=opened.ref, old_sha=start, new_sha=sha)
    return MadeCommit(sha=sha, changes=[change], pull_request=opened.num)


def _opened_before(
    log: EventLog, repository: Repository, identity: Identity, base: str, sha: str
) -> MadeCommit | None:
    """The pull request that an earlier try of the same request has opened. A client that lost the
    answer sends the request again. The commits then differ only in their time."""
    with log.database.read() as connection:
        mine = list_discussions(
            connection, repository, pull_requests=True, statuses=OPEN, author=identity.user
        )
    heads, wanted = read_refs(repository), read_commit(repository, sha)
    for each in mine:
        head = heads.get(each.ref)
        if each.base == base and head is not None and read_commit(repository, head) == wanted:
            return MadeCommit(sha=head, changes=(), pull_request=each.num)
    return None


def find_branch(
    repository: Repository, revision: str, *, or_pull_request: bool = True
) -> tuple[str, str | None]:
    """The full name of the branch, and the sha of its head. With `or_pull_request`, the ref of a
    pull request counts as a branch. The sha is None for the default branch of a repository without
    commits. Raises RevisionNotFound for any other branch that does not exist."""
    refs = read_refs(repository)
    ref = revision if revision.startswith("refs/") else f"refs/heads/{revision}"
    is_branch = ref.startswith("refs/heads/") or (
        or_pull_request and ref.startswith(PULL_REQUEST_PREFIX)
    )
    if not is_branch or (ref not in refs and (refs or ref != DEFAULT_BRANCH)):
        raise RevisionNotFound(
            f"The {repository.name} has no branch {revision!r}, and a commit can only be made on "
            "a branch: create the branch first."
        )
    return ref, refs.get(ref)


def _new_commit(
    repository: Repository, head: str | None, body: CommitBody, identity: Identity
) -> NewCommit:
    return NewCommit(
        message=body.header.message,
        author=signature(identity),
        changes=planned_changes(repository, head, body),
        parent=body.header.parentCommit,
    )
