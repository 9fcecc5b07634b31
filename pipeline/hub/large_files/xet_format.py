"""Reads the formats of Xet, in which `hf_xet` sends files. A file is cut into chunks. A xorb holds
many chunks. A shard says which chunks of which xorbs make each file.

https://huggingface.co/docs/xet. All numbers are little-endian. The hash of a xorb is not checked:
what counts is the sha256 of each file that is made of its chunks.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from pipeline.hub.errors import BadRequest

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


def read_terms(shard: BinaryIO, file: XetFile) -> Iterator[tuple[str, int, int]]:
    """The parts of `file`, in their order: chunks of one xorb, from the first to the last
    (exclusive)."""
    shard.seek(file.place)
    for _ in range(file.num_terms):
        xorb, _, _, start, end = _record(shard)
        yield hash_text(xorb), start, end


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
