"""Large files that come in parts. Each upload is one file, in which every part has its place."""

import asyncio
import hashlib
import os
from collections.abc import AsyncIterator

from pipeline.hub.errors import BadRequest
from pipeline.hub.large_files import CHUNK_BYTES, LargeFiles, check, in_chunks, make_folder, to_disk


class PartialUpload:
    """`id` is of this upload alone, so that two clients with the same file do not meet."""

    def __init__(self, files: LargeFiles, id: str) -> None:
        self._files = files
        self._path = files.incoming / f"parts-{id}"

    async def receive(self, body: AsyncIterator[bytes], *, start: int, size: int) -> None:
        """One part. It may come again. Raises BadRequest where it is not of that size, and
        DiskFull."""
        make_folder(self._path.parent)
        with to_disk():
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        with open(descriptor, "r+b") as file:
            num_bytes = 0
            file.seek(start)
            async for piece in in_chunks(body):
                num_bytes += len(piece)
                if num_bytes > size:
                    break
                with to_disk():
                    await asyncio.to_thread(file.write, piece)
            with to_disk():
                file.flush()
        if num_bytes != size:
            raise BadRequest(f"{num_bytes} bytes came instead of {size}: send the part again.")

    def complete(self, oid: str, size: int) -> None:
        """Raises BadRequest where the parts are not the file `oid`, and Conflict."""
        try:
            with self._path.open("r+b") as file:
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
