"""The bare git repositories and their rows in the database: the names that clients send, creation,
look-up and removal, and the refs, where git has them now and where they were at the last event. The
callers store the events."""

import asyncio
import re
import secrets
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal, get_args

from sqlalchemy import Connection, Row, and_, bindparam, delete, insert, select, update
from sqlalchemy.sql.elements import ColumnElement

from jobs.spec import DEFAULT_BRANCH
from pipeline.hub.database import REPOS, Database, discussions, refs
from pipeline.hub.database import repositories as table
from pipeline.hub.errors import BadRequest, Conflict, RepositoryNotFound
from pipeline.hub.git import (
    PULL_REQUEST_PREFIX,
    SEEN_PREFIXES,
    clear_repository,
    end_processes,
    git,
    lines_of,
)
from pipeline.hub.large_files import LargeFiles

RepositoryType = Literal["dataset", "model", "space"]
REPOSITORY_TYPES: tuple[RepositoryType, ...] = get_args(RepositoryType)
OPEN = ("draft", "open")
"""The states in which a pull request takes commits."""
SHA = re.compile(r"[0-9a-f]{40}")

# The rule of `huggingface_hub.utils.validate_repo_id`, for either half of `owner/name`.
_NAME = re.compile(r"(?!.*(--|\.\.))(?![.-])[A-Za-z0-9._-]{1,96}(?<![.-])")
RESERVED_OWNERS = frozenset(
    {
        *(f"{type}s" for type in REPOSITORY_TYPES),
        *("api", "settings", "buckets", "collections", "oauth", "papers", "uploads"),
        *("assets", "events", "jobs", "pipelines", "playground", "releases", "webhooks"),
    }
)
"""Owners that no repository may have, because URLs that begin with them mean something else. In
lower case."""
# What `git check-ref-format` forbids in a name. So a name cannot be an expression such as `main~1`.
_FORBIDDEN_IN_REF = re.compile(
    r"[\x00-\x20\x7f\ud800-\udfff~^:?*\[\\]|\.\.|@\{|//|^[-/.]|/\.|[./]$|\.lock(/|$)"
)
_IGNORED_BY_HFS = re.compile("[\u200c-\u200f\u202a-\u202e\u206a-\u206f\ufeff]")
# `.gitmodules`, and its short names on Windows.
_GITMODULES = re.compile(r"\.gitmodules|gitmod~[1-4]|gi7eba~\d")
_MAX_REF_BYTES = 2000
_MAX_REF_PART_BYTES = 250
"""Git stores a ref as a file, and locks it by a second file with `.lock` added to its name. The
name of a file may have 255 bytes."""
_MAX_PATH_BYTES = 4000
_MAX_DEPTH = 100
_NOT_IN_PATH = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True, kw_only=True)
class RepositoryName:
    type: RepositoryType
    owner: str
    name: str

    @property
    def id(self) -> str:
        """`owner/name`, which clients call the repository's id."""
        return f"{self.owner}/{self.name}"

    @property
    def path(self) -> str:
        """The path after the hub's URL: `owner/name` for a model, `datasets/owner/name` or
        `spaces/owner/name` for the others."""
        return self.id if self.type == "model" else f"{self.type}s/{self.id}"

    def __str__(self) -> str:
        return f"{self.type} {self.id}"


def repository_name(type: str, owner: str, name: str) -> RepositoryName:
    """Raises BadRequest if a repository cannot have this type or name."""
    if type not in REPOSITORY_TYPES:
        raise BadRequest(
            f"{type!r} is not a type of repository: choose one of {', '.join(REPOSITORY_TYPES)}."
        )
    for part in (owner, name):
        if not _NAME.fullmatch(part) or part.endswith(".git"):
            raise BadRequest(
                f"{f'{owner}/{name}'!r} is not a valid repository name: use owner/name, each of 1 "
                "to 96 letters, digits, '-', '_' and '.', without '--' or '..', not beginning or "
                "ending with '-' or '.', not ending in '.git'."
            )
    return RepositoryName(type=type, owner=owner, name=name)


def is_ref_name(name: str) -> bool:
    """Whether git allows `name` as the name of a branch or a tag, and can store it."""
    if not name or _FORBIDDEN_IN_REF.search(name):
        return False
    parts = [len(part) for part in name.encode().split(b"/")]
    return max(parts) <= _MAX_REF_PART_BYTES and len(name.encode()) <= _MAX_REF_BYTES


def parents_of(path: str) -> list[str]:
    """The folders above `path`, without the root: `a` and `a/b` for `a/b/c`."""
    pieces = path.split("/")
    return ["/".join(pieces[:depth]) for depth in range(1, len(pieces))]


def new_file_path(path: str) -> str:
    """The path, if a commit over the API may add a file there. Raises BadRequest for a path that
    git cannot check out on every system, and for `.gitmodules`, whose content git would have to
    check."""
    checked = changed_path(path)
    for piece in re.split(r"[/\\]", checked):
        # Some file systems ignore certain characters, and so read `.g\u200cit` as `.git`. On
        # Windows, a backslash ends a folder's name. Git refuses such paths on every system.
        plain = _IGNORED_BY_HFS.sub("", piece).partition(":")[0].rstrip(" .").casefold()
        if plain in (".git", "git~1"):
            raise BadRequest(f"{path!r} leads into git's own folder: choose another name.")
        if _GITMODULES.fullmatch(plain):
            raise BadRequest(f"{path!r} describes submodules: add it by a push with git.")
    return checked


def changed_path(path: str) -> str:
    """The path, if a commit over the API may add or delete something there. A commit may delete a
    file that it may not add, because a push may have added it. Raises BadRequest."""
    if not is_path(path):
        raise BadRequest(
            f"{path!r} is not a path of a file in a repository: write folder/file, without an "
            "empty part, '.' or '..', a control character, or half of a character (a surrogate)."
        )
    if len(path.encode()) > _MAX_PATH_BYTES or path.count("/") > _MAX_DEPTH:
        raise BadRequest(
            f"The path {path[:100]!r}… has more than {_MAX_PATH_BYTES} bytes or {_MAX_DEPTH} "
            "folders: shorten it, or nest the folders less deeply."
        )
    return path


def is_path(path: str) -> bool:
    """Whether a client can ask for a file with this path."""
    return not _NOT_IN_PATH.search(path) and {"", ".", ".."}.isdisjoint(path.split("/"))


@dataclass(frozen=True, kw_only=True)
class Repository:
    id: str
    name: RepositoryName
    created_at: float
    folder: Path


class Repositories:
    """The repositories in `root/repos/<id>.git`. A folder has the id and not the name of its
    repository, so a move changes only a row. A new repository is made in `root/incoming`. A deleted
    repository is first moved to `root/removed`."""

    def __init__(self, root: Path, database: Database) -> None:
        self.database = database
        self.incoming = root / "incoming"
        """Holds unfinished repositories and pushes. It is emptied when the hub starts."""
        self._root = root
        self._removed = root / "removed"
        self._repos = root / REPOS
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @asynccontextmanager
    async def locked(self, find: Callable[[], Repository]) -> AsyncIterator[Repository]:
        """Gives the repository that `find` returns, and holds its lock within the block. Code that
        changes refs takes the lock before the change, and holds it until the event is stored.

        While this waits for the lock, the repository may be moved or removed, and another one may
        get its name. So this calls `find` again under the lock. Raises the errors of `find`.
        """
        while True:
            found = await asyncio.to_thread(find)
            async with self._locks[found.id]:
                repository = await asyncio.to_thread(find)
                if repository.id == found.id:
                    yield repository
                    return

    async def for_each(self, act: Callable[[Repository], object]) -> None:
        """Calls `act` in a thread for each repository whose folder exists, under its lock."""
        for present in self.all():
            with suppress(RepositoryNotFound):  # the repository was removed meanwhile
                async with self.locked(partial(self.find_by_id, present.id)) as repository:
                    if repository.folder.exists():
                        await asyncio.to_thread(act, repository)

    def folder(self, id: str) -> Path:
        return self._repos / f"{id}.git"

    def find(self, name: RepositoryName) -> Repository:
        """The repository of this name, in upper or lower case. Raises RepositoryNotFound."""
        if found := self._read(_is(name)):
            return found[0]
        raise RepositoryNotFound(
            f"There is no {name} here: check the name, or create the repository with "
            f"`hf repos create {name.id} --type {name.type}`."
        )

    def find_by_id(self, id: str) -> Repository:
        """The repository of this id, whatever its name is now. Raises RepositoryNotFound."""
        found = self._read(table.c.id == id)
        if not found:
            raise RepositoryNotFound(f"There is no repository with the id {id} here any more.")
        return found[0]

    def all(self) -> list[Repository]:
        return self._read()

    def _read(self, *conditions: ColumnElement[bool]) -> list[Repository]:
        with self.database.read() as connection:
            return [
                self._from_row(row) for row in connection.execute(select(table).where(*conditions))
            ]

    @contextmanager
    def prepared(self, name: RepositoryName) -> Iterator[Repository]:
        """A new, empty repository in `incoming`. The block calls `add`. If it raises an error, the
        folder is removed."""
        id = secrets.token_hex(12)
        aside = self.incoming / f"{id}.git"
        try:
            git(aside, "init", "--quiet", "--bare", "--template=")
            (aside / "HEAD").write_text(f"ref: {DEFAULT_BRANCH}\n")
            yield Repository(id=id, name=name, created_at=time.time(), folder=aside)
        except BaseException:
            for folder in (aside, self.folder(id)):
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def add(self, connection: Connection, prepared: Repository) -> Repository:
        """Adds the row of a prepared repository, and moves its folder to the others. Raises
        Conflict if the name is taken."""
        self._check_free(connection, prepared.name, prepared.id)
        connection.execute(
            insert(table).values(
                id=prepared.id,
                type=prepared.name.type,
                owner=prepared.name.owner,
                name=prepared.name.name,
                created_at=prepared.created_at,
            )
        )
        prepared.folder.rename(self.folder(prepared.id))
        return replace(prepared, folder=self.folder(prepared.id))

    @contextmanager
    def removal(self, repository: Repository) -> Iterator[None]:
        """Moves the repository's folder away before the block. If the block raises an error, the
        folder is moved back, else it is deleted."""
        aside = self._removed / repository.folder.name
        with suppress(FileNotFoundError):  # a person may have removed the folder
            repository.folder.rename(aside)
        try:
            yield
        except BaseException:
            with suppress(FileNotFoundError):
                aside.rename(repository.folder)
            raise
        shutil.rmtree(aside, ignore_errors=True)

    def forget(self, connection: Connection, repository: Repository) -> None:
        """Deletes the row of the repository."""
        connection.execute(delete(table).where(table.c.id == repository.id))

    def rename(self, connection: Connection, repository: Repository, to: RepositoryName) -> None:
        """Gives the repository the name `to`. Raises Conflict if this name is taken."""
        self._check_free(connection, to, repository.id)
        connection.execute(
            update(table).where(table.c.id == repository.id).values(owner=to.owner, name=to.name)
        )

    def _check_free(self, connection: Connection, name: RepositoryName, id: str) -> None:
        """Raises Conflict if another repository than `id` has the name."""
        others = select(table).where(_is(name), table.c.id != id)
        row = connection.execute(others).one_or_none()
        if row is not None:
            taken = self._from_row(row).name
            message = f"There is a {taken} here already: choose another name."
            raise Conflict(message, path=taken.path)

    def remove_incomplete(self) -> None:
        """Removes what a killed hub left unfinished. Called before the hub answers a request."""
        end_processes(self._root)
        for folder in (self.incoming, self._removed):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        self._repos.mkdir(exist_ok=True)
        for repository in self.on_disk():
            clear_repository(repository)
            LargeFiles(repository).remove_incomplete()

    def on_disk(self) -> set[Path]:
        """The folders of all repositories."""
        return set(self._repos.glob("*.git"))

    def _from_row(self, row: Row[tuple[object, ...]]) -> Repository:
        name = RepositoryName(type=row.type, owner=row.owner, name=row.name)
        return Repository(
            id=row.id,
            name=name,
            created_at=row.created_at,
            folder=self.folder(row.id),
        )


def _is(name: RepositoryName) -> ColumnElement[bool]:
    return and_(table.c.type == name.type, table.c.owner == name.owner, table.c.name == name.name)


@dataclass(frozen=True, kw_only=True)
class RefChange:
    """`old_sha` is None for a new ref, and `new_sha` is None for a deleted ref."""

    ref: str
    old_sha: str | None
    new_sha: str | None


def read_refs(repository: Repository) -> Mapping[str, str]:
    """The sha of each branch, tag and pull request, by the ref's full name (`refs/heads/main`).

    Raises HubError if git cannot read a ref. Git leaves this ref out of its list, so the hub
    would otherwise record that it was deleted.
    """
    shown = "--format=%(objectname) %(refname)"
    lines = git(repository.folder, "for-each-ref", shown, *SEEN_PREFIXES)
    pairs = (line.split(" ", 1) for line in lines_of(lines))
    return {ref: sha for sha, ref in pairs}


def open_bases(database: Database, repository: Repository) -> dict[str, str]:
    """The pull requests that are open: ref → the ref of the branch that it is for."""
    wanted = select(discussions.c.num, discussions.c.base).where(
        discussions.c.repository_id == repository.id,
        discussions.c.status.in_(OPEN),
        discussions.c.base.is_not(None),
    )
    with database.read() as connection:
        rows = connection.execute(wanted).all()
    return {f"{PULL_REQUEST_PREFIX}{row.num}": row.base for row in rows}


def known_refs(connection: Connection, repository: Repository) -> dict[str, str]:
    """The sha of each ref at its last event, by the ref's full name."""
    rows = connection.execute(
        select(refs.c.ref, refs.c.sha).where(refs.c.repository_id == repository.id)
    )
    return {row.ref: row.sha for row in rows}


def known_heads(connection: Connection) -> dict[str, str]:
    """The sha of each repository's default branch at its last event, by the repository's id."""
    newest = select(refs.c.repository_id, refs.c.sha).where(refs.c.ref == DEFAULT_BRANCH)
    return {row.repository_id: row.sha for row in connection.execute(newest)}


def ref_changes(known: Mapping[str, str], now: Mapping[str, str]) -> Iterator[RefChange]:
    # The default branch comes first, for receivers that read only the first ref.
    for ref in sorted(known.keys() | now.keys(), key=lambda ref: (ref != DEFAULT_BRANCH, ref)):
        old, new = known.get(ref), now.get(ref)
        if old != new:
            yield RefChange(ref=ref, old_sha=old, new_sha=new)


def remember(connection: Connection, repository: Repository, changes: Sequence[RefChange]) -> None:
    """Stores the new shas of the changed refs. After the next push, the hub compares the refs with
    these shas."""
    gone = delete(refs).where(
        refs.c.repository_id == repository.id, refs.c.ref == bindparam("moved")
    )
    connection.execute(gone, [{"moved": change.ref} for change in changes])
    rows = [
        {"repository_id": repository.id, "ref": change.ref, "sha": change.new_sha}
        for change in changes
        if change.new_sha is not None
    ]
    if rows:
        connection.execute(insert(refs), rows)
