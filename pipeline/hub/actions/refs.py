"""Creates and deletes branches and tags for clients of the API, and stores the event of each
change. The caller holds the repository's lock."""

from pipeline.hub.contents.history import resolve_revision
from pipeline.hub.errors import BadRequest, Conflict, RevisionNotFound
from pipeline.hub.events.log import EventLog, record_ref_changes
from pipeline.hub.git.process import git
from pipeline.hub.repositories.refs import read_refs
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens.auth import Signature

NO_REF = "0" * 40
"""Git's word for the sha of a ref that does not exist."""


def create_branch(log: EventLog, repository: Repository, ref: str, start: str | None) -> None:
    """The branch begins at the revision `start`, by default at the newest commit of `main`."""
    _refuse_existing(repository, ref)
    if start is None and not read_refs(repository):
        raise BadRequest(
            f"The {repository.name} has no commit yet, and a branch must begin at a commit: push a "
            "commit to the branch. The push also creates the branch."
        )
    commit = resolve_revision(repository, start or "main")
    git(repository.folder, "update-ref", ref, commit, NO_REF)
    record_ref_changes(repository, log)


def create_tag(
    log: EventLog,
    repository: Repository,
    ref: str,
    revision: str,
    *,
    message: str | None,
    author: Signature,
) -> None:
    """Creates an annotated tag if there is a `message`."""
    commit = resolve_revision(repository, revision)
    _refuse_existing(repository, ref)
    if message:
        git(
            repository.folder,
            # By default, git would remove lines that begin with `#`, such as titles in Markdown.
            *("tag", "-a", "--cleanup=verbatim", "-F", "-", ref.removeprefix("refs/tags/"), commit),
            stdin=f"{message}\n".encode(),
            extra=author.environment,
        )
    else:
        git(repository.folder, "update-ref", ref, commit, NO_REF)
    record_ref_changes(repository, log)


def delete_ref(log: EventLog, repository: Repository, ref: str) -> None:
    if ref not in read_refs(repository):
        raise RevisionNotFound(
            f"The {repository.name} has no {ref} that could be deleted: check the name."
        )
    git(repository.folder, "update-ref", "-d", ref)
    record_ref_changes(repository, log)


def super_squash(
    log: EventLog, repository: Repository, ref: str, *, message: str | None, author: Signature
) -> None:
    """Replaces all commits of the branch by one commit without a parent. The files of the branch
    stay the same."""
    head = resolve_revision(repository, ref)
    squashed = git(
        repository.folder,
        *("commit-tree", f"{head}^{{tree}}", "-F", "-"),
        stdin=(message or f"Super-squash branch {ref}").encode(),
        extra=author.environment,
    )
    git(repository.folder, "update-ref", ref, squashed.decode().strip(), head)
    record_ref_changes(repository, log)


def _refuse_existing(repository: Repository, ref: str) -> None:
    for existing in read_refs(repository):
        if existing == ref:
            raise Conflict(f"Reference {ref} already exists: choose another name.")
        if existing.startswith(f"{ref}/") or ref.startswith(f"{existing}/"):
            # Not a Conflict: with `exist_ok`, a client takes status 409 to mean that `ref` exists.
            raise BadRequest(
                f"Reference {ref} cannot exist together with {existing}, because git stores each "
                "ref as a file, and one of the two would be a folder: choose another name."
            )
