"""Reads the formats of Xet, in which `hf_xet` sends files. A file is cut into chunks. A xorb holds
many chunks. A shard says which chunks of which xorbs make each file.

https://huggingface.co/docs/xet. All numbers are little-endian.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from blake3 import blake3

from pipeline.hub.errors import BadRequest

MAX_XORB_BYTES = 64 * 1024 * 1024 + 64 * 1024
"""64 MiB of chunks, and 64 KiB for their headers."""
MAX_SHARD_BYTES = 64 * 1024 * 1024
_MAX_CHUNK_BYTES = 128 * 1024
_MAX_CHUNKS = 8 * 1024

_NOT_PACKED, _LZ4, _GROUPED_LZ4 = 0, 1, 2
_FOOTER = b"XETBLOB"
_SHARD_TAG = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
_SHARD_VERSION = 2
_HAS_VERIFICATION, _HAS_SHA256 = 1 << 31, 1 << 30
_RECORD = struct.Struct("<32s4I")
_END = b"\xff" * 32

# The hash of a xorb is the root of a tree of hashes. The leaves of this tree are the chunks'
# hashes. The format has one key for chunks and one for the other nodes, so that a chunk and a node
# never have the same hash.
_CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
_NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
_BRANCHING = 4

Hashed = tuple[bytes, int]
"""The hash of a chunk or of a node of the tree, and the number of bytes in it or below it."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """The place of a chunk in its xorb: the offset of its packed content, its packed and unpacked
    size, and how it is packed."""

    offset: int
    packed_bytes: int
    num_bytes: int
    scheme: int


@dataclass(frozen=True, kw_only=True)
class Term:
    """A part of a file: the chunks `start` to `end` (exclusive) of one xorb, with `num_bytes` bytes
    in all."""

    xorb: str
    num_bytes: int
    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class XetFile:
    """A file that a shard describes. Its terms begin at the offset `place` of the shard. They are
    not held in memory, because there may be very many; `read_terms` reads them."""

    place: int
    num_terms: int
    size: int
    sha256: str | None
    """None if the client did not send the sha256."""


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
        if len(header) < 8:
            raise BadRequest(
                f"The xorb ends within the header of chunk {len(chunks)}: send it again."
            )
        packed = int.from_bytes(header[1:4], "little")
        num_bytes = int.from_bytes(header[5:8], "little")
        chunk = Chunk(offset=offset + 8, packed_bytes=packed, num_bytes=num_bytes, scheme=header[4])
        offset += 8 + packed
        if header[0] != 0 or chunk.scheme > _GROUPED_LZ4:
            raise BadRequest(
                f"Chunk {len(chunks)} of the xorb has version {header[0]} and compression "
                f"{chunk.scheme}, which this hub does not know: send the file without `hf_xet`."
            )
        if not num_bytes or num_bytes > _MAX_CHUNK_BYTES or packed > 2 * _MAX_CHUNK_BYTES:
            raise BadRequest(
                f"Chunk {len(chunks)} of the xorb has {num_bytes} bytes ({packed} packed): send "
                f"chunks of 1 to {_MAX_CHUNK_BYTES} bytes."
            )
        if offset > size or len(chunks) == _MAX_CHUNKS:
            raise BadRequest(
                f"The xorb ends within chunk {len(chunks)}, or it has more than {_MAX_CHUNKS} "
                "chunks."
            )
        chunks.append(chunk)
    if not chunks:
        raise BadRequest("The xorb has no chunk: send at least one.")
    return chunks


def read_chunk(xorb: BinaryIO, chunk: Chunk) -> bytes:
    """The unpacked content of a chunk. Raises BadRequest if it cannot be unpacked."""
    xorb.seek(chunk.offset)
    content = xorb.read(chunk.packed_bytes)
    if chunk.scheme != _NOT_PACKED:
        content = _unpack(content, chunk.num_bytes)
    if chunk.scheme == _GROUPED_LZ4:
        content = _ungroup(content)
    if len(content) != chunk.num_bytes:
        raise BadRequest(
            f"A chunk of the xorb has {len(content)} bytes instead of {chunk.num_bytes}: send the "
            "xorb again."
        )
    return content


def xorb_hash(xorb: BinaryIO) -> str:
    """The hash by which shards name the xorb. Raises BadRequest if the file is not a xorb."""
    hashes = [
        (blake3(read_chunk(xorb, chunk), key=_CHUNK_KEY).digest(), chunk.num_bytes)
        for chunk in list_chunks(xorb)
    ]
    while len(hashes) > 1:
        hashes = list(_merge(hashes))
    return hash_text(hashes[0][0])


def read_shard(shard: BinaryIO) -> Iterator[XetFile]:
    """The files that the shard describes. Raises BadRequest if the file is not a shard."""
    shard.seek(0)
    header = shard.read(48)
    if len(header) < 48 or header[:32] != _SHARD_TAG:
        raise BadRequest("The body is not a shard: it does not begin with the tag of shards.")
    if (version := int.from_bytes(header[32:40], "little")) != _SHARD_VERSION:
        raise BadRequest(
            f"The shard has version {version}: this hub knows only version {_SHARD_VERSION}."
        )
    while (record := _record(shard))[0] != _END:
        _, flags, num_terms, *_ = record
        place = shard.tell()
        size = sum(_record(shard)[2] for _ in range(num_terms))
        if flags & _HAS_VERIFICATION:
            for _ in range(num_terms):
                _record(shard)
        sha256 = hash_text(_record(shard)[0]) if flags & _HAS_SHA256 else None
        after = shard.tell()
        yield XetFile(place=place, num_terms=num_terms, size=size, sha256=sha256)
        shard.seek(after)


def read_terms(shard: BinaryIO, file: XetFile) -> Iterator[Term]:
    """The parts of `file`, in their order."""
    shard.seek(file.place)
    for _ in range(file.num_terms):
        xorb, _, num_bytes, start, end = _record(shard)
        yield Term(xorb=hash_text(xorb), num_bytes=num_bytes, start=start, end=end)


def _record(shard: BinaryIO) -> tuple[bytes, int, int, int, int]:
    data = shard.read(_RECORD.size)
    if len(data) < _RECORD.size:
        raise BadRequest("The shard ends early: send it again.")
    record: tuple[bytes, int, int, int, int] = _RECORD.unpack(data)
    return record


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


def _merge(hashes: Sequence[Hashed]) -> Iterator[Hashed]:
    """The nodes one level higher in the tree of hashes. A node has three to nine children. From the
    third child on, a child whose hash is divisible by four is the last child of its node. The last
    node of a level may have fewer than three children."""
    start = 0
    while start < len(hashes):
        end = min(start + 2 * _BRANCHING + 1, len(hashes))
        for place in range(start + 2, end):
            if int.from_bytes(hashes[place][0][24:], "little") % _BRANCHING == 0:
                end = place + 1
                break
        group = hashes[start:end]
        text = "".join(f"{hash_text(value)} : {size}\n" for value, size in group)
        yield blake3(text.encode(), key=_NODE_KEY).digest(), sum(size for _, size in group)
        start = end
