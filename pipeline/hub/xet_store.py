"""What `hf_xet` has sent to one repository: xorbs, in `lfs/xet/<store id>` of its folder.

The client remembers what it has sent to which address and does not send it again. The id is in the
address, so a store that was emptied gets a new id, and the client sends everything again.
"""

import contextlib
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from pathlib import Path

from starlette.concurrency import run_in_threadpool

from pipeline.hub.errors import BadRequest, TooLarge
from pipeline.hub.large_files import LargeFiles, in_chunks, publish, to_disk
from pipeline.hub.pointers import OID
from pipeline.hub.xet import (
    MAX_SHARD_BYTES,
    MAX_XORB_BYTES,
    Chunk,
    Term,
    XetFile,
    list_chunks,
    read_chunk,
    read_shard,
    xorb_hash,
)

_making = threading.Lock()


class XetStore:
    """`folder` is the folder of a repository; `id` is that of its store at some time."""

    def __init__(self, folder: Path, id: str) -> None:
        self._files = LargeFiles(folder)
        self._xorbs = _stores(folder) / id
        self.id = id

    @classmethod
    def current(cls, folder: Path) -> "XetStore":
        """The store that clients send to from now on; made if there is none."""
        with _making, to_disk():
            found = sorted(_stores(folder).glob("*"))
            store = found[0] if found else _stores(folder) / secrets.token_hex(8)
            store.mkdir(parents=True, exist_ok=True)
            store.touch()  # it is in use: see `empty`
        return cls(folder, store.name)

    def check_is_current(self) -> None:
        """Raises BadRequest, which the client does not retry."""
        if not self._xorbs.is_dir():
            raise BadRequest("The hub has emptied this store meanwhile: start the upload again.")

    async def receive_xorb(self, body: AsyncIterator[bytes], hash: str) -> None:
        """Raises BadRequest where it is no xorb of that hash, and DiskFull."""
        async with self._draft(body, MAX_XORB_BYTES) as file:

            def move() -> None:
                if (found := xorb_hash(file)) != hash:
                    raise BadRequest(f"The xorb has the hash {found} instead of {hash}.")
                self.check_is_current()
                publish(file, self._xorb(hash))

            await run_in_threadpool(move)
