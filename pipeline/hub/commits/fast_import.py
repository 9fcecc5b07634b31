"""Makes one commit of the changes that an API client sends, with one `git fast-import`.

The caller holds the repository's lock. The format that `git fast-import` reads is described at
https://git-scm.com/docs/git-fast-import.
"""

import contextlib
import secrets
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO

from pipeline.hub.commits.checks import Change, check_changes
from pipeline.hub.contents.attributes import ATTRIBUTES_FILE, NEW_REPOSITORY
from pipeline.hub.contents.history import read_commit
from pipeline.hub.errors import BadRequest, DiskFull, EntryNotFound, HubError, PreconditionFailed
from pipeline.hub.git.process import INCOMING_PREFIX, PLACE, git, git_environment, is_disk_full
from pipeline.hub.repositories.names import DEFAULT_BRANCH
from pipeline.hub.repositories.refs import RefChange
from pipeline.hub.repositories.store import Repository
from pipeline.hub.tokens.auth import Signature

_MOVED_ON = (
    "The branch was updated since you opened this page. Please refresh and try again: {branch} is "
    "at {head}, and the commit was made for {parent}."
)


@dataclass(frozen=True, kw_only=True)
class NewCommit:
    message: str
    author: Signature
    changes: Sequence[Change]
    parent: str | None = None
    """The sha, or at least its first 7 digits, of the commit on which the client based the changes.
    None if the client named no commit. The changes then apply to any head."""


def make_commit(repository: Repository, ref: str, head: str | None, new: NewCommit) -> str:
    """Makes the commit on top of `head`, moves `ref` to it, and returns its sha. If the files stay
    as they are in `head`, this makes no commit and returns `head`.

    A client that lost the answer to a commit sends the commit again. If `head` already is this
    commit, this returns `head`.

    Raises PreconditionFailed if the client based the changes on another commit than `head`. Raises
    EntryNotFound if something to delete does not exist. Raises BadRequest if a path would be both
    a file and a folder. Raises DiskFull.
    """
    try:
        if new.parent is not None and not (head or "").startswith(new.parent):
            raise PreconditionFailed(
                _MOVED_ON.format(branch=ref, head=head or "no commit yet", parent=new.parent)
            )
        check_changes(new.changes, repository, head)
    except (PreconditionFailed, EntryNotFound, BadRequest):
        if head is not None and _is_repeated(repository, head, new):
            return head
        raise
    commit = import_commit(repository, head, new)
    if head is not None and _tree(repository, commit) == _tree(repository, head):
        return head
    git(repository.folder, "update-ref", ref, commit, head or "0" * 40)
    return commit


def first_commit(repository: Repository, author: Signature) -> RefChange:
    """Makes the first commit of a new repository, which has only a `.gitattributes`. Every new
    repository on the Hugging Face Hub begins with such a commit."""
    attributes = Change(action="add", path=ATTRIBUTES_FILE, read=NEW_REPOSITORY.encode)
    new = NewCommit(message="initial commit\n", author=author, changes=[attributes])
    sha = make_commit(repository, DEFAULT_BRANCH, None, new)
    return RefChange(ref=DEFAULT_BRANCH, old_sha=None, new_sha=sha)


def _is_repeated(repository: Repository, head: str, new: NewCommit) -> bool:
    """Whether `head` is the commit `new`, made by an earlier request of the client. It is if the
    message, the parent and the tree are equal."""
    made = read_commit(repository, head)
    before = made.parents[0] if len(made.parents) == 1 else None
    if made.message != new.message or (new.parent and not (before or "").startswith(new.parent)):
        return False
    try:
        check_changes(new.changes, repository, before)
    except (EntryNotFound, BadRequest):
        return False
    return _tree(repository, import_commit(repository, before, new)) == made.tree


def _tree(repository: Repository, commit: str) -> str:
    return read_commit(repository, commit).tree


def import_commit(repository: Repository, parent: str | None, new: NewCommit) -> str:
    """Makes a commit, and returns its sha. No ref leads to it, so the next garbage collection
    removes it if the caller adds none. Raises DiskFull."""
    incoming = f"{INCOMING_PREFIX}{secrets.token_hex(8)}"
    try:
        run_fast_import(repository, _stream(incoming, parent, new))
        return git(repository.folder, "rev-parse", "--verify", incoming).decode().strip()
    finally:
        # Ask git only if the ref exists: on a full disk, git fails even if there is no such ref.
        if (repository.folder / incoming).exists():
            git(repository.folder, "update-ref", "-d", incoming)


def _stream(ref: str, parent: str | None, new: NewCommit) -> Iterator[bytes]:
    who = f"{new.author.name} <{new.author.email}> {int(time.time())} +0000"
    message = new.message.encode()
    yield f"commit {ref}\nauthor {who}\ncommitter {who}\ndata {len(message)}\n".encode()
    yield message
    yield b"\n"
    if parent is not None:
        yield f"from {parent}\n".encode()
    for change in new.changes:
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


def run_fast_import(repository: Repository, stream: Iterable[bytes]) -> None:
    """Runs one `git fast-import`. `stream` must end with the line `done`. Raises DiskFull."""
    process = subprocess.Popen(
        ["git", f"--git-dir={repository.folder}", "fast-import", "--quiet", "--done"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=git_environment({PLACE: str(repository.folder)}),
    )
    assert process.stdin is not None and process.stderr is not None
    try:
        _write(process.stdin, stream)
        reason = process.stderr.read().decode(errors="replace").strip()
    finally:
        # If the stream broke off, git gets no last line `done`, so it makes no commit.
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        process.stderr.close()
        process.wait()
    if process.returncode != 0:
        for report in repository.folder.glob("fast_import_crash_*"):
            report.unlink(missing_ok=True)
        # If the disk was full, an incomplete pack is left. No other process is writing a pack now,
        # because the caller holds the repository's lock.
        for pack in repository.folder.glob("objects/pack/tmp_pack_*"):
            pack.unlink(missing_ok=True)
        if is_disk_full(reason):
            raise DiskFull(
                "The hub could not store the commit, because its disk is full: make room there, "
                "then send the commit again."
            )
        raise HubError(f"git fast-import failed in {repository.folder}: {reason}")


def _write(stdin: IO[bytes], stream: Iterable[bytes]) -> None:
    # If git ends early, the pipe breaks. The caller then reads the reason from standard error.
    with contextlib.suppress(BrokenPipeError):
        for piece in stream:
            stdin.write(piece)
        stdin.close()
