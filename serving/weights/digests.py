"""Two digests of every byte of a shard, of the file and of each tensor, on threads of their own.

A file has its sha256, as the Hub and `sha256sum` know it. A tensor has its BLAKE3
(https://github.com/BLAKE3-team/BLAKE3-specs), which takes a quarter of the time and is what a
swap computes again of all that it reads. Both let go of the interpreter while they hash, so they
run while the caller writes or fsyncs.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from blake3 import blake3

from serving.weights.release import FileEntry

_ALGORITHMS: dict[str, Callable[[], Any]] = {"blake3": blake3, "sha256": hashlib.sha256}
# What a tensor gets where there is no digest to compare with.
_NEW = "blake3:"


class TensorDigest:
    """Of bytes that come piece by piece, `blake3:` and 64 hex by default.

    `like` is a digest to compare with: it says which algorithm.
    """

    def __init__(self, like: str = _NEW) -> None:
        self._algorithm = like.partition(":")[0]
        self._hash = _ALGORITHMS[self._algorithm]()

    def update(self, content: bytes | memoryview) -> None:
        self._hash.update(content)

    def __str__(self) -> str:
        return f"{self._algorithm}:{self._hash.hexdigest()}"


def tensor_digest(content: bytes | memoryview, like: str = _NEW) -> str:
    digest = TensorDigest(like)
    digest.update(content)
    return str(digest)


class ShardDigests:
    """Takes the content of one shard in the order of its bytes; entered before the first of it.

    It holds on to what it is given until `finish`: nobody may change or free that before.
    """

    def __init__(self) -> None:
        # A thread each, and no more: the bytes of a file are hashed in their order.
        self._of_file = ThreadPoolExecutor(max_workers=1, thread_name_prefix="file-digest")
        self._of_tensors = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tensor-digest")
        self._file = hashlib.sha256()
        self._size = 0
        self._tensors: dict[str, Future[str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        # After a failure nobody wants the rest.
        for threads in (self._of_file, self._of_tensors):
            threads.shutdown(cancel_futures=True)

    def add(self, content: bytes | memoryview) -> None:
        """Bytes that are of no tensor."""
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
