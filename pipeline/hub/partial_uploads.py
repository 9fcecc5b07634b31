"""Large files that come in parts. Each upload is one file, in which every part has its place."""

import asyncio
import contextlib
import hashlib
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from pipeline.hub.errors import BadRequest, Conflict
from pipeline.hub.large_files import CHUNK_BYTES, LargeFiles, check, in_chunks, make_folder, to_disk

_turns = threading.Condition()
_num_writing: Counter[Path] = Counter()
_closed: set[Path] = set()
"""Uploads that are being completed: nothing may write to them."""


class PartialUpload:
    """`id` is of this upload alone, so that two clients with the same file do not meet."""

    def __init__(self, files: LargeFiles, id: str) -> None:
        self._files = files
        self._path = files.incoming / f"parts-{id}"

    async def receive(self, body: AsyncIterator[bytes], *, start: int, size: int) -> None:
        """One part. It may come again. Raises BadRequest where it is not of that size, Conflict if
        the upload was completed meanwhile, and DiskFull."""
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
        """Raises Conflict if the file is no longer that of the upload. A client may have given up
        this part, sent it again and completed the upload; what still comes of it must not be
        written into a file that readers get."""
        with _turns:
            if self._path in _closed or not self._is_open_here(descriptor):
                raise Conflict("The upload was completed while this part came.")
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
        """Nothing writes to the upload within the block."""
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
        """Raises BadRequest where the parts are not the file `oid`, and Conflict."""
        try:
            with self._alone(), self._path.open("r+b") as file:
                digest, num_bytes = hashlib.sha256(), 0
                while piece := file.read(CHUNK_BYTES):
                    digest.update(piece)
                    num_bytes += len(piece)
                check(digest.hexdigest(), num_bytes, oid=oid, size=size)
                self._files.adopt(file, oid)
        except FileNotFoundError:
            # Complete already, and the client did not get the answer?
            if self._files.size(oid) != size:
                raise BadRequest("No part of the file is here: send it again.") from None
