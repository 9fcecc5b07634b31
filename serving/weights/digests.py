"""Two sha256 of every byte of a shard, of the file and of each tensor, on threads of their own.

hashlib lets go of the interpreter while it hashes, so both run while the caller writes or fsyncs.
"""

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from serving.weights.release import FileEntry


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
        self._tensors[name] = self._of_tensors.submit(_sha256, content)

    def finish(self) -> tuple[FileEntry, dict[str, str]]:
        """Size and sha256 of the file, and tensor name → sha256."""
        whole = self._of_file.submit(self._file.hexdigest).result()
        tensors = {name: digest.result() for name, digest in self._tensors.items()}
        return FileEntry(size=self._size, sha256=whole), tensors


def _sha256(content: memoryview) -> str:
    return hashlib.sha256(content).hexdigest()
