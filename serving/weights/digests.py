"""Computes the digest of a shard file and of each tensor in it, on two threads.

The file gets a sha256, which the Hub and `sha256sum` use. A tensor gets a BLAKE3
(https://github.com/BLAKE3-team/BLAKE3-specs). BLAKE3 takes a quarter of the time, which matters
because a swap computes the digest of every tensor that it reads. Both algorithms release the GIL
while they hash, so the caller can write or fsync meanwhile.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO, Self

from blake3 import blake3

from serving.weights.release import FileEntry

_ALGORITHMS: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
_DEFAULT = "blake3:"


class TensorDigest:
    """The digest of bytes that come piece by piece. Its `str` is `blake3:` and 64 hex digits.

    `like` is a digest that this digest will be compared with. The prefix of `like` selects the
    algorithm.
    """

    def __init__(self, like: str = _DEFAULT) -> None:
        self._algorithm = like.partition(":")[0]
        self._hash = _ALGORITHMS[self._algorithm]()

    def update(self, content: bytes | memoryview) -> None:
        self._hash.update(content)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def tensor_digest(content: bytes | memoryview, like: str = _DEFAULT) -> str:
    """The digest of a tensor's bytes, with the algorithm of `like`."""
    digest = TensorDigest(like)
    digest.update(content)
    return str(digest)


class ShardDigests:
    """A context manager that takes the content of one shard, in the order of the shard's bytes.

    The threads read the content later, so the caller must not change or free it before `finish`.
    """

    def __init__(self) -> None:
        # One thread in each pool, so that the bytes of a file are hashed in their order.
        self._of_file = ThreadPoolExecutor(max_workers=1, thread_name_prefix="file-digest")
        self._of_tensors = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensor-digest")
        self._file = hashlib.sha256()
        self._size = 0
        self._tensors: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After an error the remaining digests are not needed.
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
        """Size and sha256 of the file, and tensor name → digest."""
        whole = self._of_file.submit(self._file.hexdigest).result()
        tensors = {name: digest.result() for name, digest in self._tensors.items()}
        return FileEntry(size=self._size, sha256=whole), tensors


class HashingFile:
    """Passes each write on to `raw`, and hashes the content first.

    torch.save frees each piece right after it has written the piece, so `write` must hash the piece
    before it returns.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()
        self._size = 0

    def write(self, content: bytes | memoryview) -> int:
        self._hash.update(content)
        self._size += memoryview(content).nbytes
        return self._raw.write(content)

    def flush(self) -> None:
        self._raw.flush()

    def entry(self) -> FileEntry:
        """Size and sha256 of everything that was written."""
        return FileEntry(size=self._size, sha256=self._hash.hexdigest())
