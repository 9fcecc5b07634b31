"""Reads the header of a safetensors file and computes the file's digests, without torch.

A safetensors file has three parts: the length of the header (8 bytes, a little-endian integer), the
header (JSON), and the bytes of the tensors, without gaps between the tensors. See
https://huggingface.co/docs/safetensors.
"""

import hashlib
import json
import math
import mmap
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from serving.errors import ReleaseError
from serving.weights.release import FileEntry, TensorEntry, tensor_digest

DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8, "C64": 8,
}  # fmt: skip

MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class HeaderEntry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    """Offset of the tensor's first byte in the file."""
    end: int
    """Offset of the first byte after the tensor."""


def read_header(path: Path) -> dict[str, HeaderEntry]:
    """Tensor name → header entry, in the order in which the tensors are stored in the file. Raises
    ReleaseError if the file is not a complete safetensors file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise ReleaseError(
                f"{path.name}: truncated or not a safetensors file: it has {size:,} bytes, but it "
                f"begins with a header length of {length:,} bytes (the longest allowed header has "
                f"{MAX_HEADER_BYTES:,})"
            )
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = {
                name: _entry(each, 8 + length)
                for name, each in sorted(header.items(), key=lambda item: item[1]["data_offsets"])
            }
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            OverflowError,
            RecursionError,
        ) as error:
            raise ReleaseError(f"{path.name}: not a safetensors header: {error}") from None
    _check_layout(path.name, entries, 8 + length, size)
    return entries


class ShardDigests:
    """Computes the digests of one shard on two threads. Use it in a `with` block.

    Add the content in the order of the shard's bytes. The threads read the content later, so the
    caller must not change or free the content before `finish` returns. Both hash functions release
    the GIL, so the caller can write or fsync at the same time.
    """

    def __init__(self) -> None:
        # Use one thread in each pool, so that the pieces of a file are hashed in the right order.
        self._of_file = ThreadPoolExecutor(max_workers=1, thread_name_prefix="file-digest")
        self._of_tensors = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensor-digest")
        self._file = hashlib.sha256()
        self._size = 0
        self._tensors: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error, nobody needs the digests that are not computed yet, so cancel them.
        for threads in (self._of_file, self._of_tensors):
            threads.shutdown(cancel_futures=True)

    def add(self, content: bytes | memoryview) -> None:
        """Add bytes that belong to no tensor, such as the header."""
        self._of_file.submit(self._file.update, content)
        self._size += memoryview(content).nbytes

    def add_tensor(self, name: str, content: memoryview) -> None:
        self.add(content)
        self._tensors[name] = self._of_tensors.submit(tensor_digest, content)

    def finish(self) -> tuple[FileEntry, dict[str, str]]:
        """Wait until everything is hashed. Returns the size and sha256 of the file, and a dict of
        tensor name → digest."""
        sha256 = self._of_file.submit(self._file.hexdigest).result()
        tensors = {name: digest.result() for name, digest in self._tensors.items()}
        return FileEntry(size=self._size, sha256=sha256), tensors


def digest_shard(path: Path) -> tuple[FileEntry, dict[str, TensorEntry]]:
    """The size and sha256 of a safetensors file, and a dict of tensor name → manifest entry. Raises
    ReleaseError."""
    header = read_header(path)
    with mapped_shard(path, header) as (start, contents), ShardDigests() as digests:
        digests.add(start)
        for name, content in contents.items():
            digests.add_tensor(name, content)
        file, of_tensors = digests.finish()
    return file, {
        name: TensorEntry(
            file=path.name, dtype=entry.dtype, shape=entry.shape, digest=of_tensors[name]
        )
        for name, entry in header.items()
    }


@contextmanager
def mapped_shard(
    path: Path, header: Mapping[str, HeaderEntry]
) -> Iterator[tuple[memoryview, dict[str, memoryview]]]:
    """Yields the bytes before the first tensor, and a dict of tensor name → the tensor's bytes.

    All these bytes are views of the mapped file. The views are valid only until the `with` block
    ends.
    """
    with path.open("rb") as file, ExitStack() as stack:
        # Enter the mapping first, so that the stack closes it last. A mapping cannot be closed
        # while a view of it is open.
        mapped = stack.enter_context(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        data = stack.enter_context(memoryview(mapped))
        contents = {
            name: stack.enter_context(data[entry.begin : entry.end])
            for name, entry in header.items()
        }
        first = min((entry.begin for entry in header.values()), default=len(data))
        yield stack.enter_context(data[:first]), contents


def digest_file(path: Path) -> FileEntry:
    """Size and sha256 of any file. Raises OSError."""
    with path.open("rb") as file:
        return FileEntry(
            size=path.stat().st_size, sha256=hashlib.file_digest(file, "sha256").hexdigest()
        )


def _entry(raw: dict[str, Any], start: int) -> HeaderEntry:
    begin, end = raw["data_offsets"]
    return HeaderEntry(
        dtype=str(raw["dtype"]),
        shape=tuple(int(dimension) for dimension in raw["shape"]),
        begin=start + int(begin),
        end=start + int(end),
    )


def _check_layout(file: str, entries: dict[str, HeaderEntry], start: int, size: int) -> None:
    position = start
    for name, entry in entries.items():
        if entry.dtype not in DTYPE_BYTES:
            raise ReleaseError(f"{file}: tensor {name}: dtype {entry.dtype} is not known")
        num_bytes = math.prod(entry.shape) * DTYPE_BYTES[entry.dtype]
        if min(entry.shape, default=0) < 0 or entry.end - entry.begin != num_bytes:
            raise ReleaseError(
                f"{file}: tensor {name}: {entry.end - entry.begin} bytes, "
                f"but {entry.dtype} {list(entry.shape)} takes {num_bytes}"
            )
        if entry.begin != position:
            raise ReleaseError(
                f"{file}: tensor {name}: starts at byte {entry.begin} instead of {position}"
            )
        if entry.end > size:
            raise ReleaseError(
                f"{file}: truncated: tensor {name} ends at byte {entry.end} of {size}"
            )
        position = entry.end
    if position != size:
        raise ReleaseError(f"{file}: {size - position} bytes too many after the last tensor")
