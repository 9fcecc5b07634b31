"""Computes the digest of a shard file and of each tensor in it, on two threads.

The digest of a file is a sha256, because the Hub and `sha256sum` use sha256. The digest of a tensor
is a BLAKE3 (https://github.com/BLAKE3-team/BLAKE3-specs), which takes a quarter of the time of
sha256. The time matters because a server that loads a release computes the digest of every tensor
that it reads. Both implementations release the GIL while they hash, so the caller can write or
fsync at the same time.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from blake3 import blake3

from serving.weights.release import FileEntry

_ALGORITHMS: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
_DEFAULT = "blake3:"


class TensorDigest:
    """Computes the digest of bytes that arrive in pieces. `str()` of this object returns the
    digest: the name of the algorithm, a colon and 64 hex digits.

    `like` is a digest with which the caller will compare the result. So the result is computed with
    the same algorithm as `like`. For example, if `like` comes from an old manifest (format 1), the
    algorithm is sha256. Without `like`, the algorithm is BLAKE3.
    """

    def __init__(self, like: str = _DEFAULT) -> None:
        self._algorithm = like.partition(":")[0]
        self._hash = _ALGORITHMS[self._algorithm]()

    def update(self, content: bytes | memoryview) -> None:
        self._hash.update(content)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def tensor_digest(content: bytes | memoryview, like: str = _DEFAULT) -> str:
    """The digest of a tensor's bytes, computed with the same algorithm as the digest `like`."""
    digest = TensorDigest(like)
    digest.update(content)
    return str(digest)


class ShardDigests:
    """Computes the digests of one shard in background threads. Use it in a `with` block.

    Add the content in the order of the shard's bytes. The threads read the content later, so the
    caller must not change or free the content before `finish` returns.
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
