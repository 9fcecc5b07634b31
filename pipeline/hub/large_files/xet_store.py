"""Stores the xorbs (groups of chunks of files) that `hf_xet` has sent for a repository, in
`lfs/xet/<store id>` of its folder. The files that are made of xorbs go to `store.py`.

The client remembers which chunks it has sent to which URL, and does not send them there again. The
URL has the id of a store. If no file can be made of the xorbs of a store, because one of them is
lost or wrong, the hub begins a new store. Clients send everything again to the URL of the new
store. Uploads to the older store go on.
"""

import contextlib
import os
import secrets
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from pipeline.formats import OID
from pipeline.hub.errors import BadRequest, TooLarge
from pipeline.hub.large_files.store import LargeFiles, make_folder, publish, temporary_file
from pipeline.hub.large_files.xet_format import (
    Chunk,
    XetFile,
    list_chunks,
    read_chunk,
    read_shard,
    read_terms,
)

_making = threading.Lock()


class XetStore:
    """The store `id` of the repository in `folder`. The hub may have removed the store after the
    client got this id."""

    def __init__(self, folder: Path, id: str) -> None:
        self.id = id
        self._folder = folder
        self._files = LargeFiles(folder)
        self._xorbs = _stores(folder) / id

    @classmethod
    def current(cls, folder: Path) -> "XetStore":
        """The store to which clients send now. Makes one if there is none."""
        make_folder(_stores(folder), below=folder)
        with _making:
            found = sorted(_stores(folder).glob("*"), key=lambda store: store.stat().st_mtime_ns)
            store = found[-1] if found else _begin(folder)
            os.utime(store)  # `empty` removes only stores with an old time
        return cls(folder, store.name)

    def check_is_there(self) -> None:
        """Raises BadRequest if the store was removed. The client does not repeat a request that
        gets this error."""
        if not self._xorbs.is_dir():
            raise BadRequest("The hub has emptied this Xet store: start the upload again.")

    async def receive_xorb(self, body: AsyncIterator[bytes], hash: str) -> None:
        """Stores a xorb. Raises BadRequest if this is not the form of a hash."""
        path = self._xorb(hash)
        async with self._draft(body) as file:
            self.check_is_there()
            await run_in_threadpool(publish, file, path, below=self._xorbs)

    async def receive_shard(self, body: AsyncIterator[bytes], *, max_file_bytes: int) -> None:
        """Makes each file that the shard describes out of the stored xorbs, and stores it as a
        large file.

        Raises BadRequest if a file cannot be made of the xorbs, or has another sha256 than the
        shard says. Raises TooLarge if a file has more than `max_file_bytes` bytes.
        """
        async with self._draft(body) as file:

            def rebuild() -> None:
                for each in read_shard(file):
                    if each.size > max_file_bytes:
                        raise TooLarge(
                            f"A file may have {max_file_bytes} bytes at most: "
                            "raise [hub] max_push_bytes."
                        )
                # The first loop has read the complete shard, so no file of an invalid shard is
                # stored.
                for each in read_shard(file):
                    if each.sha256 is None or not self._files.keep(each.sha256):
                        self._make(file, each)

            await run_in_threadpool(rebuild)

    def _make(self, shard: BinaryIO, file: XetFile) -> None:
        try:
            self._files.store(self._content(shard, file), file.sha256, file.size)
        except BadRequest:
            # The hub was restored from a backup, for example. The client remembers the xorbs that
            # it has sent, and sends them again only to the URL of another store. The present store
            # stays, because other clients may be sending to it.
            with _making:
                _begin(self._folder)
            raise

    def _content(self, shard: BinaryIO, file: XetFile) -> Iterator[bytes]:
        chunks = lru_cache(maxsize=16)(self._chunks)
        for hash, start, end in read_terms(shard, file):
            with self._open(hash) as xorb:
                for chunk in chunks(hash)[start:end]:
                    yield read_chunk(xorb, chunk)

    def _chunks(self, hash: str) -> list[Chunk]:
        with self._open(hash) as xorb:
            return list_chunks(xorb)

    def _open(self, hash: str) -> BinaryIO:
        try:
            return self._xorb(hash).open("rb")
        except FileNotFoundError:
            raise BadRequest(
                f"The hub does not have the xorb {hash}: start the upload again to send it."
            ) from None

    def _xorb(self, hash: str) -> Path:
        if not OID.fullmatch(hash):
            raise BadRequest(f"{hash!r} is not the hash of a xorb: write 64 hexadecimal digits.")
        return self._xorbs / hash

    @contextlib.asynccontextmanager
    async def _draft(self, body: AsyncIterator[bytes]) -> AsyncIterator[BinaryIO]:
        """A temporary file with the complete body."""
        self.check_is_there()
        with temporary_file(self._files.incoming, below=self._folder) as file:
            async for piece in body:
                await run_in_threadpool(file.write, piece)
            yield file


def empty(folder: Path, *, grace_seconds: float) -> None:
    """Removes the stores of the repository, with their xorbs. A store stays if a client began an
    upload to it in the last `grace_seconds` seconds, because this client would have to begin again.
    The files that were made of xorbs stay."""
    for store in _stores(folder).glob("*"):
        # While the lock is held, `current` gives this store to no client.
        with _making, contextlib.suppress(FileNotFoundError):
            if store.stat().st_mtime <= time.time() - grace_seconds:
                # First move the store away, so that no request finds a store that is half deleted.
                doomed = LargeFiles(folder).incoming / f"xet-{store.name}"
                make_folder(doomed.parent, below=folder)
                store.rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)


def _begin(folder: Path) -> Path:
    """Makes an empty store, which is then the newest of the repository."""
    store = _stores(folder) / secrets.token_hex(8)
    store.mkdir()
    return store


def _stores(folder: Path) -> Path:
    return folder / "lfs" / "xet"
