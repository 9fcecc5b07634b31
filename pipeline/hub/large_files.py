"""The content of large files, by its sha256, in `lfs/` of each repository's folder.

The layout is that of `git lfs`: `lfs/objects/ab/cd/<sha256>`. A file is moved and removed with its
repository. What comes in is written to `lfs/incoming` first, and renamed when it is whole and its
sha256 is right, so a reader never sees half of a file.
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

from pipeline.hub.errors import BadRequest, Conflict, DiskFull
from pipeline.pointers import OID

CHUNK_BYTES = 1024 * 1024
"""How much of a file is in memory at a time."""
GRACE_SECONDS = 3600.0
"""A file that no commit names is kept this long, because its commit may still come."""

_DEPTH = 4
"""Of the folders that a file is in, below the repository's."""


class LargeFiles:
    """`folder` is the folder of a repository."""

    def __init__(self, folder: Path) -> None:
        self._objects = folder / "lfs" / "objects"
        self.incoming = folder / "lfs" / "incoming"
        """Half-received files; emptied when the hub starts."""

    def path(self, oid: str) -> Path:
        """Where the file is if it is here. Raises BadRequest for what is no sha256."""
        _check_oid(oid)
        return self._objects / oid[:2] / oid[2:4] / oid

    def size(self, oid: str) -> int | None:
        """None where the file is not here."""
        try:
            return self.path(oid).stat().st_size
        except FileNotFoundError:
            return None

    def keep(self, oid: str) -> bool:
        """Whether the file is here. If so, its time in which its commit may come begins anew."""
        try:
            os.utime(self.path(oid))
        except FileNotFoundError:
            return False
        return True

    async def receive(self, body: AsyncIterator[bytes], oid: str, size: int) -> None:
        """Store what comes. Raises BadRequest where it is not `size` bytes with the sha256 `oid`,
        and DiskFull."""
        with self._draft() as draft:
            async for piece in in_chunks(body):
                draft.check_size(size, num_more=len(piece))
                await asyncio.to_thread(draft.write, piece)
            draft.check(oid, size)
            await asyncio.to_thread(self.adopt, draft.file, oid)

    def store(self, pieces: Iterable[bytes], oid: str | None, size: int) -> str:
        """As `receive`, for what is on this machine; without an `oid`, whatever it is. Returns the
        sha256."""
        with self._draft() as draft:
            for piece in pieces:
                draft.check_size(size, num_more=len(piece))
                draft.write(piece)
            oid = oid or draft.sha256
            draft.check(oid, size)
            self.adopt(draft.file, oid)
        return oid

    def adopt(self, file: BinaryIO, oid: str) -> None:
        """A file that is in `incoming`, and of which the caller knows that it is `oid`."""
        path = self.path(oid)
        publish(file, path, below=path.parents[_DEPTH])

    def link(self, other: "LargeFiles", oid: str) -> bool:
        """Take the file from the store of another repository. Returns whether it is here now.

        Both stores share the bytes on disk: a large file never changes.
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
            _fsync_folder(path.parent)
        return self.keep(oid)

    async def read(self, oid: str, *, start: int, length: int) -> AsyncIterator[bytes]:
        """`length` bytes from `start` on. Raises FileNotFoundError."""
        with await asyncio.to_thread(self.path(oid).open, "rb") as file:
            file.seek(start)
            while length and (
                piece := await asyncio.to_thread(file.read, min(length, CHUNK_BYTES))
            ):
                length -= len(piece)
                yield piece

    def oids(self) -> Iterator[str]:
        """The sha256 of every file that is here."""
        for path in self._objects.glob("??/??/*"):
            if OID.fullmatch(path.name):
                yield path.name

    def remove(self, oids: Iterable[str]) -> int:
        """Returns how many bytes that makes free."""
        num_bytes = 0
        for oid in oids:
            with contextlib.suppress(FileNotFoundError):
                path = self.path(oid)
                num_bytes += path.stat().st_size
                path.unlink()
        return num_bytes

    def remove_others(self, named: Collection[str], *, grace_seconds: float) -> int:
        """Remove what is not `named` and came more than `grace_seconds` ago; returns the number of
        bytes. It also removes what began to come and did not go on for as long."""
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

    def clear_leftovers(self) -> None:
        """Only safe while nothing comes in."""
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
    """A file that comes in, with the sha256 of what is there."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self._num_bytes = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def check_size(self, size: int, *, num_more: int) -> None:
        """Raises BadRequest as soon as more comes than was told."""
        if self._num_bytes + num_more > size:
            raise BadRequest(f"More than the {size} bytes that were announced came: send them all.")

    def write(self, piece: bytes) -> None:
        with to_disk():
            self.file.write(piece)
        self._num_bytes += len(piece)
        self._hash.update(piece)

    def check(self, oid: str, size: int) -> None:
        check(self.sha256, self._num_bytes, oid=oid, size=size)


def check(sha256: str, num_bytes: int, *, oid: str, size: int) -> None:
    """Raises BadRequest where what came is not what was announced."""
    _check_oid(oid)
    if num_bytes != size:
        raise BadRequest(f"{num_bytes} bytes came instead of {size}: send the file again.")
    if sha256 != oid:
        raise BadRequest(
            f"What came has the sha256 {sha256} instead of {oid}: "
            "the file changed while it was sent, so send it again."
        )


def _check_oid(oid: str) -> None:
    if not OID.fullmatch(oid):
        raise BadRequest(f"{oid!r} is no sha256: write 64 hexadecimal digits in lower case.")


def publish(file: BinaryIO, path: Path, *, below: Path) -> None:
    """Move a whole file to where readers look for it. After a power cut it is whole or not there.

    below: what must be there already; the folders in it are made. Raises Conflict where it is not
    there any more, and DiskFull.
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
            _fsync_folder(folder)


def make_folder(folder: Path) -> None:
    """`lfs/<name>` of a repository. Raises Conflict where the repository is not there any more: a
    folder of that name would be taken for a new one."""
    for each in (folder.parent, folder):
        try:
            with contextlib.suppress(FileExistsError):
                each.mkdir()
        except FileNotFoundError:
            raise Conflict("The repository was moved or removed: look for it again.") from None
        except OSError as error:
            raise _disk_full(error) from error


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def to_disk() -> Iterator[None]:
    """Raises DiskFull for what the system says of a disk."""
    try:
        yield
    except OSError as error:
        raise _disk_full(error) from error


def _disk_full(error: OSError) -> DiskFull:
    return DiskFull(f"The file could not be stored ({error.strerror}): make room, send it again.")


async def in_chunks(body: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in pieces of about `CHUNK_BYTES`: each is a thread's work of its own."""
    waiting = bytearray()
    async for piece in body:
        waiting += piece
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)
