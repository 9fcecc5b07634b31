"""Receives large files that come in parts. Each upload is one file, and each part is written at its
offset in this file."""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pipeline.hub.errors import BadRequest, Conflict
from pipeline.hub.large_files.store import (
    CHUNK_BYTES,
    LargeFiles,
    check,
    in_chunks,
    make_folder,
    to_disk,
)

_turns = threading.Condition()
_num_writing: Counter[Path] = Counter()
_closed: set[Path] = set()
"""The uploads that are being completed. No part may be written to them."""


class PartialUpload:
    """One upload. Each upload has its own `id`, so two clients can send the same file at once."""

    def __init__(self, files: LargeFiles, id: str) -> None:
        self._files = files
        self._path = files.incoming / f"parts-{id}"

    async def receive(self, body: AsyncIterator[bytes], *, start: int, size: int) -> None:
        """Writes one part, whose first byte is at the offset `start`. A client may send a part
        again. Raises BadRequest if the part does not have `size` bytes, Conflict if the upload was
        completed meanwhile, and DiskFull."""
        make_folder(self._path.parent)
        with to_disk():
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            num_bytes = 0
            async for piece in in_chunks(body):
                num_bytes += len(piece)
                if num_bytes > size:
                    break
                offset = start + num_bytes - len(piece)
                await asyncio.to_thread(self._write, descriptor, piece, offset)
        finally:
            os.close(descriptor)
        if num_bytes != size:
            raise BadRequest(f"{num_bytes} bytes came instead of {size}: send the part again.")

    def _write(self, descriptor: int, piece: bytes, offset: int) -> None:
        left = memoryview(piece)
        with self._turn(descriptor), to_disk():
            while left:
                num_bytes = os.pwrite(descriptor, left, offset)
                left, offset = left[num_bytes:], offset + num_bytes

    @contextlib.contextmanager
    def _turn(self, descriptor: int) -> Iterator[None]:
        """Lets the block write to the upload. Raises Conflict if the upload was completed. A client
        may break off a part, send it again and complete the upload. If bytes of the first try come
        after that, they must not be written, because readers get the file already."""
        with _turns:
            if self._path in _closed or not self._is_open_here(descriptor):
                raise Conflict(
                    "The upload was completed while this part came: do not send the part again."
                )
            _num_writing[self._path] += 1
        try:
            yield
        finally:
            with _turns:
                _num_writing[self._path] -= 1
                if not _num_writing[self._path]:
                    del _num_writing[self._path]
                _turns.notify_all()

    def _is_open_here(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), self._path.stat())
        except FileNotFoundError:
            return False

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no part is being written. Within the block, nobody can write a part."""
        with _turns:
            _turns.wait_for(lambda: self._path not in _closed and not _num_writing[self._path])
            _closed.add(self._path)
        try:
            yield
        finally:
            with _turns:
                _closed.discard(self._path)
                _turns.notify_all()

    def complete(self, oid: str, size: int) -> None:
        """Stores the file. Raises BadRequest if the parts together do not have `size` bytes and the
        sha256 `oid`, and Conflict if the repository does not exist any more."""
        try:
            with self._alone(), self._path.open("r+b") as file:
                digest, num_bytes = hashlib.sha256(), 0
                while piece := file.read(CHUNK_BYTES):
                    digest.update(piece)
                    num_bytes += len(piece)
                check(digest.hexdigest(), num_bytes, oid=oid, size=size)
                self._files.adopt(file, oid)
        except FileNotFoundError:
            # The upload may be complete already: a client that did not get the answer asks again.
            if self._files.size(oid) != size:
                raise BadRequest(
                    "The hub has no part of this upload any more: send the file again."
                ) from None
