"""Makes one commit of the changes that an API client sends, with one `git fast-import`.

The caller holds the repository's lock. The format that `git fast-import` reads is described at
https://git-scm.com/docs/git-fast-import.
"""

import secrets
import tempfile
import time
from collections.abc import Iterable, Iterator

from pipeline.hub.commits.body import CommitBody
from pipeline.hub.commits.changes import Change, planned_changes
from pipeline.hub.contents.attributes import ATTRIBUTES_FILE, NEW_REPOSITORY
from pipeline.hub.contents.history import read_commit
from pipeline.hub.errors import BadRequest, EntryNotFound, HubError, PreconditionFailed
from pipeline.hub.git.process import INCOMING_PREFIX, NO_REF, clear_repository, git
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens import Signature

_MOVED_ON = (
    "The branch was updated since you opened this page. Please refresh and try again: {branch} is "
    "at {head}, and the commit was made for {parent}."
)


def make_commit(
    repository: Repository, ref: str, head: str | None, body: CommitBody, author: Signature
) -> str:
    """Makes the commit on top of `head`, moves `ref` to it, and returns its sha. If the files stay
    as they are in `head`, this makes no commit and returns `head`.

    A client that lost the answer to a commit sends the commit again. If `head` already is this
    commit, this returns `head`.

    Raises PreconditionFailed if the client based the changes on another commit than `head`. Raises
    the errors of `planned_changes`, and DiskFull.
    """
    parent = body.header.parentCommit
    try:
        if parent is not None and not (head or "").startswith(parent):
            raise PreconditionFailed(
                _MOVED_ON.format(branch=ref, head=head or "no commit yet", parent=parent)
            )
        changes = planned_changes(repository, head, body)
    except (PreconditionFailed, EntryNotFound, BadRequest):
        if head is not None and _is_repeated(repository, head, body, author):
            return head
        raise
    commit = import_commit(repository, head, body.header.message, author, changes)
    if head is not None and _tree(repository, commit) == _tree(repository, head):
        return head
    git(repository.folder, "update-ref", ref, commit, head or NO_REF)
    return commit


def first_commit(repository: Repository, author: Signature) -> RefChange:
    """Makes the first commit of a new repository, which has only a `.gitattributes`. Every new
    repository on the Hugging Face Hub begins with such a commit."""
    attributes = Change(action="add", path=ATTRIBUTES_FILE, read=NEW_REPOSITORY.encode)
    sha = import_commit(repository, None, "initial commit\n", author, [attributes])
    git(repository.folder, "update-ref", DEFAULT_BRANCH, sha, NO_REF)
    return RefChange(ref=DEFAULT_BRANCH, old_sha=None, new_sha=sha)


def _is_repeated(repository: Repository, head: str, body: CommitBody, author: Signature) -> bool:
    """Whether `head` is this commit, made by an earlier request of the client. It is if the
    message, the parent and the tree are equal."""
    made = read_commit(repository, head)
    before = made.parents[0] if len(made.parents) == 1 else None
    message, parent = body.header.message, body.header.parentCommit
    if made.message != message or (parent and not (before or "").startswith(parent)):
        return False
    try:
        changes = planned_changes(repository, before, body)
    except (EntryNotFound, BadRequest):
        return False
    again = import_commit(repository, before, message, author, changes)
    return _tree(repository, again) == made.tree


def _tree(repository: Repository, commit: str) -> str:
    return read_commit(repository, commit).tree


def import_commit(
    repository: Repository,
    parent: str | None,
    message: str,
    author: Signature,
    changes: Iterable[Change],
) -> str:
    """Makes a commit, and returns its sha. No ref leads to it, so the next garbage collection
    removes it if the caller adds none. Raises DiskFull."""
    incoming = f"{INCOMING_PREFIX}{secrets.token_hex(8)}"
    try:
        _run_fast_import(repository, _stream(incoming, parent, message, author, changes))
        return git(repository.folder, "rev-parse", "--verify", incoming).decode().strip()
    finally:
        # Ask git only if the ref exists: on a full disk, git fails even if there is no such ref.
        if (repository.folder / incoming).exists():
            git(repository.folder, "update-ref", "-d", incoming)


def _stream(
    ref: str, parent: str | None, message: str, author: Signature, changes: Iterable[Change]
) -> Iterator[bytes]:
    who = f"{author.name} <{author.email}> {int(time.time())} +0000"
    text = message.encode()
    yield f"commit {ref}\nauthor {who}\ncommitter {who}\ndata {len(text)}\n".encode()
    yield text
    yield b"\n"
    if parent is not None:
        yield f"from {parent}\n".encode()
    for change in changes:
        path = _quoted(change.path)
        if change.action == "add":
            content = change.read()
            mode = b"100755" if change.is_executable else b"100644"
            yield b"M %s inline %s\ndata %d\n" % (mode, path, len(content))
            yield content
            yield b"\n"
        else:
            yield b"D %s\n" % path
    yield b"done\n"


def _quoted(path: str) -> bytes:
    escaped = path.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'.encode()


def _run_fast_import(repository: Repository, stream: Iterable[bytes]) -> None:
    # First into a file, so that git gets nothing if the stream breaks off.
    with tempfile.TemporaryFile(dir=repository.folder) as file:
        for piece in stream:
            file.write(piece)
        file.seek(0)
        try:
            git(repository.folder, "fast-import", "--quiet", "--done", stdin=file)
        except HubError:
            # Git leaves a report, and an incomplete pack if the disk is full. No other process is
            # writing a pack now, because the caller holds the repository's lock.
            clear_repository(repository.folder)
            raise
