"""The files that `hf_xet` sends. It cuts a file into chunks. A xorb holds many chunks. A shard says
which chunks of which xorbs make each file. The hub stores the xorbs of a repository in
`lfs/xet/<store id>` of its folder, and makes large files of them (`large_files.py`).

The client remembers which chunks it has sent to which URL, and does not send them there again. The
URL has the id of a store. If no file can be made of the xorbs of a store, because one of them is
lost or wrong, the hub begins a new store. Clients send everything again to the URL of the new one.
Uploads to the older store go on.

https://huggingface.co/docs/xet describes the formats. All numbers are little-endian. The hash of a
xorb is not checked: what counts is the sha256 of each file that is made of its chunks.
"""

import contextlib
import os
import shutil
import struct
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from starlette.concurrency import run_in_threadpool

from pipeline.formats import OID
from pipeline.hub.errors import BadRequest, TooLarge
from pipeline.hub.large_files import LargeFiles, make_folder, publish, temporary_file

MAX_XORB_BYTES = 64 * 1024 * 1024 + 64 * 1024
"""64 MiB of chunks, and 64 KiB for their headers."""
MAX_SHARD_BYTES = 64 * 1024 * 1024
_MAX_CHUNKS = 8 * 1024

_NOT_PACKED, _LZ4, _GROUPED_LZ4 = 0, 1, 2
_FOOTER = b"XETBLOB"
_SHARD_TAG = (
    b"HFRepoMetaData\0"
    + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
    + (2).to_bytes(8, "little")
)
"""With the version at its end."""
_HAS_VERIFICATION, _HAS_SHA256 = 1 << 31, 1 << 30
_RECORD = struct.Struct("<32s4I")
_END = b"\xff" * 32


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The place of a chunk in its xorb: the offset of its packed content, its packed and unpacked
    size, and how it is packed."""

    offset: int
    packed_bytes: int
    num_bytes: int
    scheme: int


@dataclass(frozen=True, kw_only=True)
class XetFile:
    """A file that a shard describes."""

    terms: bytes
    """The records of its parts, in their order: chunks of one xorb, from the first to the last
    (exclusive). Not unpacked, because there may be very many."""
    sha256: str | None
    """None if the client did not send the sha256."""

    @property
    def size(self) -> int:
        return sum(num_bytes for _, _, num_bytes, _, _ in _RECORD.iter_unpack(self.terms))


def hash_text(value: bytes) -> str:
    """A hash as it stands in URLs: four numbers of 8 bytes each, in hexadecimal digits."""
    return "".join(f"{number:016x}" for number in struct.unpack("<4Q", value))


def list_chunks(xorb: BinaryIO) -> list[Chunk]:
    """The chunks of a xorb. Raises BadRequest if the file is not a xorb."""
    xorb.seek(0, 2)
    size, offset = xorb.tell(), 0
    chunks: list[Chunk] = []
    while offset < size:
        xorb.seek(offset)
        header = xorb.read(8)
        if header[:7] == _FOOTER:
            break
        packed, num_bytes = (int.from_bytes(header[at : at + 3], "little") for at in (1, 5))
        offset += 8 + packed
        if len(header) < 8 or offset > size:
            raise BadRequest(f"The xorb ends within chunk {len(chunks)}: send it again.")
        if header[0] != 0 or header[4] > _GROUPED_LZ4 or len(chunks) == _MAX_CHUNKS:
            raise BadRequest(
                f"Chunk {len(chunks)} of the xorb has version {header[0]} and compression "
                f"{header[4]}, which this hub does not know, or there are more than {_MAX_CHUNKS} "
                "chunks: send the file without `hf_xet`."
            )
        chunks.append(
            Chunk(
                offset=offset - packed, packed_bytes=packed, num_bytes=num_bytes, scheme=header[4]
            )
        )
    return chunks


def read_chunk(xorb: BinaryIO, chunk: Chunk) -> bytes:
    """The unpacked content of a chunk. Raises BadRequest if it cannot be unpacked."""
    xorb.seek(chunk.offset)
    content = xorb.read(chunk.packed_bytes)
    if chunk.scheme != _NOT_PACKED:
        content = _unpack(content, chunk.num_bytes)
    if chunk.scheme == _GROUPED_LZ4:
        content = _ungroup(content)
    return content


def read_shard(shard: BinaryIO) -> Iterator[XetFile]:
    """The files that the shard describes. Raises BadRequest if the file is not a shard."""
    shard.seek(0)
    header = shard.read(48)
    if len(header) < 48 or not header.startswith(_SHARD_TAG):
        raise BadRequest(
            "The body is not a shard of version 2: it does not begin with the tag of such shards."
        )
    while (record := _records(shard, 1))[:32] != _END:
        _, flags, num_terms, _, _ = _RECORD.unpack(record)
        terms = _records(shard, num_terms)
        if flags & _HAS_VERIFICATION:
            _records(shard, num_terms)
        sha256 = hash_text(_records(shard, 1)[:32]) if flags & _HAS_SHA256 else None
        yield XetFile(terms=terms, sha256=sha256)


def _records(shard: BinaryIO, number: int) -> bytes:
    data = shard.read(number * _RECORD.size)
    if len(data) < number * _RECORD.size:
        raise BadRequest("The shard ends early: send it again.")
    return data


def _unpack(content: bytes, num_bytes: int) -> bytes:
    import lz4.frame  # here, because most hubs never get a packed chunk

    try:
        # With a limit, because a few packed bytes can become any number of unpacked bytes.
        unpacked: bytes = lz4.frame.LZ4FrameDecompressor().decompress(content, num_bytes + 1)
    except RuntimeError as error:
        raise BadRequest(
            f"A chunk of the xorb cannot be unpacked ({error}): send the xorb again."
        ) from None
    return unpacked


def _ungroup(grouped: bytes) -> bytes:
    """Restores the order of the bytes. The packed chunk has the first byte of each group of four,
    then the second byte of each group, and so on."""
    content, start = bytearray(len(grouped)), 0
    for place in range(4):
        end = start + len(range(place, len(grouped), 4))
        content[place::4] = grouped[start:end]
        start = end
    return bytes(content)


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
            store = max(_stores(folder).iterdir(), default=None) or _begin(folder)
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
                # Completely, so that no file of an invalid shard is stored.
                found = list(read_shard(file))
                if any(each.size > max_file_bytes for each in found):
                    raise TooLarge(
                        f"A file may have {max_file_bytes} bytes at most: "
                        "raise [hub] max_push_bytes."
                    )
                for each in found:
                    if each.sha256 is None or not self._files.keep(each.sha256):
                        self._make(each)

            await run_in_threadpool(rebuild)

    def _make(self, file: XetFile) -> None:
        try:
            self._files.store(self._content(file), file.sha256, file.size)
        except BadRequest:
            # The hub was restored from a backup, for example. The client remembers the xorbs that
            # it has sent, and sends them again only to the URL of another store. This store stays,
            # because other clients may be sending to it.
            with _making:
                _begin(self._folder)
            raise

    def _content(self, file: XetFile) -> Iterator[bytes]:
        chunks = lru_cache(maxsize=16)(self._chunks)
        for xorb_hash, _, _, start, end in _RECORD.iter_unpack(file.terms):
            hash = hash_text(xorb_hash)
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
    """Makes an empty store. Its id is the time, so that the newest store has the greatest name."""
    store = _stores(folder) / f"{time.time_ns():016x}"
    store.mkdir()
    return store


def _stores(folder: Path) -> Path:
    return folder / "lfs" / "xet"
