"""Stores the content of large files in the folder of their repository, so that it is moved and
removed with the repository.

The path is that of `git lfs`: `lfs/objects/ab/cd/<sha256>`. The hub writes a file to `lfs/incoming`
and renames it when it is complete and its sha256 is right. So a reader never sees half of a file.
"""

import asyncio
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from jobs.folder import fsync_dir
from pipeline.hub.errors import BadRequest, Conflict, DiskFull
from pipeline.pointers import OID

CHUNK_BYTES = 1024 * 1024
"""How many bytes of a file are in memory at a time."""
GRACE_SECONDS = 3600.0
"""How many seconds a file that no commit names is kept, because its commit may still come."""

_DEPTH = 4
"""How many folders there are between the repository's folder and a file."""


class LargeFiles:
    """The large files of the repository in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "lfs" / "objects"
        self.incoming = folder / "lfs" / "incoming"
        """The folder of unfinished files. It is emptied when the hub starts."""

    def path(self, oid: str) -> Path:
        """The path of the file, whether or not it exists. Raises BadRequest if `oid` is not a
        sha256."""
        _check_oid(oid)
        return self._objects / oid[:2] / oid[2:4] / oid

    def size(self, oid: str) -> int | None:
        """The size in bytes. None if the file is not stored."""
        try:
            return self.path(oid).stat().st_size
        except FileNotFoundError:
            return None

    def keep(self, oid: str) -> bool:
        """Whether the file is stored. If it is, its `GRACE_SECONDS` begin again."""
        try:
            os.utime(self.path(oid))
        except FileNotFoundError:
            return False
        return True

    async def receive(self, body: AsyncIterator[bytes], oid: str, size: int) -> None:
        """Stores a file that a client sends. Raises BadRequest if it does not have `size` bytes and
        the sha256 `oid`, and DiskFull."""
        with self._draft() as draft:
            async for piece in in_chunks(body):
                draft.check_size(size, num_more=len(piece))
                await asyncio.to_thread(draft.write, piece)
            draft.check(oid, size)
            await asyncio.to_thread(self._adopt, draft.file, oid)

    def store(self, pieces: Iterable[bytes], oid: str | None, size: int) -> str:
        """As `receive`, for content that is already on this machine. If `oid` is None, the content
        may have any sha256. Returns its sha256."""
        with self._draft() as draft:
            for piece in pieces:
                draft.check_size(size, num_more=len(piece))
                draft.write(piece)
            oid = oid or draft.sha256
            draft.check(oid, size)
            self._adopt(draft.file, oid)
        return oid

    def _adopt(self, file: BinaryIO, oid: str) -> None:
        """Moves a file from `incoming` to its path. The caller has checked that its sha256 is
        `oid`."""
        path = self.path(oid)
        publish(file, path, below=path.parents[_DEPTH])

    def link(self, other: "LargeFiles", oid: str) -> bool:
        """Takes the file from another repository, as a hard link. Returns whether this repository
        has the file now.

        Both repositories can share the bytes on disk, because a large file never changes.
        """
        if self.keep(oid):
            return True
        path = self.path(oid)
        with to_disk():
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(other.path(oid), path)
            except FileExistsError:
                pass
            except FileNotFoundError:
                return False
            fsync_dir(path.parent)
        return self.keep(oid)

    async def read(self, oid: str, *, start: int, length: int) -> AsyncIterator[bytes]:
        """Gives `length` bytes from the offset `start`, in pieces. Raises FileNotFoundError."""
        # A reader that goes away does not end `run_in_threadpool` early, so the opened file always
        # reaches the `with` that closes it.
        with await run_in_threadpool(self.path(oid).open, "rb") as file:
            file.seek(start)
            while length and (
                piece := await run_in_threadpool(file.read, min(length, CHUNK_BYTES))
            ):
                length -= len(piece)
                yield piece

    def oids(self) -> Iterator[str]:
        """The sha256 of every stored file."""
        for path in self._objects.glob("??/??/*"):
            if OID.fullmatch(path.name):
                yield path.name

    def remove(self, oids: Iterable[str]) -> int:
        """Deletes files, and returns how many bytes they had. Skips a file that does not exist."""
        num_bytes = 0
        for oid in oids:
            with contextlib.suppress(FileNotFoundError):
                path = self.path(oid)
                num_bytes += path.stat().st_size
                path.unlink()
        return num_bytes

    def remove_others(self, named: Collection[str], *, grace_seconds: float) -> int:
        """Deletes the files that are not in `named` and came more than `grace_seconds` ago. Returns
        how many bytes they had. Also deletes unfinished files that did not grow for this time."""
        before = time.time() - grace_seconds
        for path in self.incoming.glob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < before:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        doomed = []
        for oid in self.oids():
            with contextlib.suppress(FileNotFoundError):
                if oid not in named and self.path(oid).stat().st_mtime < before:
                    doomed.append(oid)
        return self.remove(doomed)

    def remove_incomplete(self) -> None:
        """Deletes all unfinished files. Called only while no client sends a file."""
        shutil.rmtree(self.incoming, ignore_errors=True)

    @contextlib.contextmanager
    def _draft(self) -> Iterator["_Draft"]:
        make_folder(self.incoming)
        with to_disk():
            file = tempfile.NamedTemporaryFile(dir=self.incoming, delete=False)  # noqa: SIM115
        try:
            with file:
                yield _Draft(file)  # type: ignore[arg-type]
        finally:
            Path(file.name).unlink(missing_ok=True)


class _Draft:
    """A file that is being written, and the sha256 of what is written so far."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._num_bytes = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def check_size(self, size: int, *, num_more: int) -> None:
        """Raises BadRequest if `num_more` further bytes would be more than `size` in all."""
        if self._num_bytes + num_more > size:
            raise BadRequest(
                f"The client announced {size} bytes and sent more: the file changed while it was "
                "sent, so send it again."
            )

    def write(self, piece: bytes) -> None:
        with to_disk():
            self.file.write(piece)
        self._num_bytes += len(piece)
        self._hash.update(piece)

    def check(self, oid: str, size: int) -> None:
        """Raises BadRequest if the draft is not the announced file, which has `size` bytes and the
        sha256 `oid`."""
        _check_oid(oid)
        if self._num_bytes != size:
            raise BadRequest(
                f"{self._num_bytes} bytes came instead of {size}: send the file again."
            )
        if self.sha256 != oid:
            raise BadRequest(
                f"The file that came has the sha256 {self.sha256} instead of {oid}: "
                "the file changed while it was sent, so send it again."
            )


def _check_oid(oid: str) -> None:
    if not OID.fullmatch(oid):
        raise BadRequest(f"{oid!r} is not a sha256: write 64 hexadecimal digits in lower case.")


def publish(file: BinaryIO, path: Path, *, below: Path) -> None:
    """Moves a complete file to `path`, where readers look for it. After a power cut, the file is
    there completely or not at all.

    Makes the missing folders between `below` and `path`. Raises Conflict if the folder `below` does
    not exist any more, and DiskFull.
    """
    changed = [path.parent]
    with to_disk():
        file.flush()
        os.fsync(file.fileno())
        between = [folder for folder in path.parents if below in folder.parents]
        for folder in reversed(between):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                folder.mkdir()
                changed.append(folder.parent)
        try:
            Path(file.name).rename(path)
        except FileNotFoundError:
            raise Conflict(
                "The repository was moved or removed while the file came: send it again."
            ) from None
        for folder in changed:
            fsync_dir(folder)


def make_folder(folder: Path) -> None:
    """Makes the folder `lfs/<name>` of a repository. Raises Conflict if the repository's folder
    does not exist any more. This does not make the repository's folder again, because the hub would
    take it for a repository."""
    for each in (folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                each.mkdir()
        except FileNotFoundError:
            raise Conflict(
                "The repository was moved or removed meanwhile: check its name, then send the file "
                "again."
            ) from None
        except OSError as error:
            raise _disk_full(error) from error


@contextlib.contextmanager
def to_disk() -> Iterator[None]:
    """Turns every OSError within the block into DiskFull."""
    try:
        yield
    except OSError as error:
        raise _disk_full(error) from error


def _disk_full(error: OSError) -> DiskFull:
    return DiskFull(
        f"The hub could not store the file ({error.strerror}): make room on the hub's disk, then "
        "send the file again."
    )


async def in_chunks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Joins the pieces of `body`: each new piece has at least `CHUNK_BYTES` bytes, except the last.
    The caller writes each piece in a thread, so small pieces would be slow."""
    waiting = bytearray()
    async for piece in body:
        waiting += piece
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)
