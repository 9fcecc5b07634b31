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
from functools import partial
from pathlib import Path
from typing import BinaryIO

from jobs.folder import fsync_dir
from pipeline.formats import OID
from pipeline.hub.errors import BadRequest, Conflict

CHUNK_BYTES = 1024 * 1024
"""How many bytes of a file are in memory at a time."""
GRACE_SECONDS = 3600.0
"""How many seconds a file that no commit names is kept, because its commit may still come."""


class LargeFiles:
    """The large files of the repository in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._objects = folder / "lfs" / "objects"
        self.incoming = folder / "lfs" / "incoming"
        """The folder of unfinished files. It is emptied when the hub starts."""

    def path(self, oid: str) -> Path:
        """The path of the file, whether or not it exists. Raises BadRequest if `oid` is not a
        sha256."""
        if not OID.fullmatch(oid):
            raise BadRequest(f"{oid!r} is not a sha256: write 64 hexadecimal digits in lower case.")
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
        the sha256 `oid`."""
        digest = hashlib.sha256()
        with temporary_file(self.incoming, below=self._folder) as file:
            async for piece in body:
                await asyncio.to_thread(_write, file, digest, piece, size)
            await asyncio.to_thread(self._adopt, file, digest.hexdigest(), oid, size)

    def store(self, pieces: Iterable[bytes], oid: str | None, size: int) -> str:
        """As `receive`, for content that is already on this machine. If `oid` is None, the content
        may have any sha256. Returns its sha256."""
        digest = hashlib.sha256()
        with temporary_file(self.incoming, below=self._folder) as file:
            for piece in pieces:
                _write(file, digest, piece, size)
            found = digest.hexdigest()
            self._adopt(file, found, oid or found, size)
        return found

    def link(self, source: Path, oid: str, size: int) -> None:
        """Stores a file of this machine that nothing ever writes to again, as a second name of it
        (a hard link), without reading it; `oid` must be its sha256. On another file system, stores
        a copy, and raises as `store`."""
        path = self.path(oid)
        make_folder(path.parent, below=self._folder)
        try:
            os.link(source, path)
        except FileExistsError:
            return
        except OSError:
            with source.open("rb") as file:
                self.store(iter(partial(file.read, CHUNK_BYTES), b""), oid, size)
        fsync_dir(path.parent)

    def _adopt(self, file: BinaryIO, found: str, oid: str, size: int) -> None:
        """Moves a complete file to its path; `found` is its sha256. Raises BadRequest if it is not
        the announced file."""
        path = self.path(oid)
        if (came := file.tell()) != size:
            raise BadRequest(f"{came} bytes came instead of {size}: send the file again.")
        if found != oid:
            raise BadRequest(
                f"The file that came has the sha256 {found} instead of {oid}: "
                "the file changed while it was sent, so send it again."
            )
        publish(file, path, below=self._folder)

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
        how many bytes they had."""
        before = time.time() - grace_seconds
        others = [oid for oid in self.oids() if oid not in named]
        return self.remove(oid for oid in others if self.path(oid).stat().st_mtime < before)

    def remove_incomplete(self) -> None:
        """Deletes all unfinished files. Called only while no client sends a file."""
        shutil.rmtree(self.incoming, ignore_errors=True)


def _write(file: BinaryIO, digest: "hashlib._Hash", piece: bytes, size: int) -> None:
    """Writes one more piece of a file that must have `size` bytes in the end."""
    if file.tell() + len(piece) > size:
        raise BadRequest(
            f"The client announced {size} bytes and sent more: the file changed while it was sent, "
            "so send it again."
        )
    file.write(piece)
    digest.update(piece)


@contextlib.contextmanager
def temporary_file(folder: Path, *, below: Path) -> Iterator[BinaryIO]:
    """A new file in `folder`, which is removed after the block unless it was published. Raises as
    `make_folder` does."""
    make_folder(folder, below=below)
    file = tempfile.NamedTemporaryFile(dir=folder, delete=False)  # noqa: SIM115
    try:
        with file:
            yield file  # type: ignore[misc]
    finally:
        Path(file.name).unlink(missing_ok=True)


def publish(file: BinaryIO, path: Path, *, below: Path) -> None:
    """Moves a complete file to `path`, where readers look for it. After a power cut, the file is
    there completely or not at all. Raises as `make_folder` does."""
    file.flush()
    os.fsync(file.fileno())
    make_folder(path.parent, below=below)
    Path(file.name).rename(path)
    fsync_dir(path.parent)


def make_folder(folder: Path, *, below: Path) -> None:
    """Makes the missing folders between `below` and `folder`. Raises Conflict if `below` does not
    exist any more."""
    if not below.is_dir():
        raise Conflict(
            "The repository was removed meanwhile: create it again, then send the file again."
        )
    for each in reversed([each for each in (folder, *folder.parents) if below in each.parents]):
        with contextlib.suppress(FileExistsError):
            each.mkdir()
            fsync_dir(each.parent)
