"""Two digests of the same bytes, on threads that do not outlive a failure."""

import hashlib
import threading

import pytest
from blake3 import blake3

from serving.weights.headers import ShardDigests

START, FIRST, SECOND = b"header", b"a" * 3_000_000, b"b" * 5


def test_the_file_is_hashed_in_the_order_of_its_bytes_and_each_tensor_alone() -> None:
    with ShardDigests() as digests:
        digests.add(START)
        digests.add_tensor("first", memoryview(FIRST))
        digests.add_tensor("second", memoryview(SECOND))
        file, tensors = digests.finish()
    assert file.size == len(START + FIRST + SECOND)
    assert file.sha256 == hashlib.sha256(START + FIRST + SECOND).hexdigest()
    assert tensors == {
        "first": f"blake3:{blake3(FIRST).hexdigest()}",
        "second": f"blake3:{blake3(SECOND).hexdigest()}",
    }


def test_a_shard_without_tensors_has_a_digest() -> None:
    with ShardDigests() as digests:
        file, tensors = digests.finish()
    assert (file.size, file.sha256, tensors) == (0, hashlib.sha256().hexdigest(), {})


def test_after_a_failure_nothing_holds_the_bytes_or_runs_on() -> None:
    before = threading.active_count()
    content = bytearray(1_000_000)
    with pytest.raises(OSError, match="full"), ShardDigests() as digests:
        for number in range(20):
            digests.add_tensor(f"t{number}", memoryview(content))
        raise OSError("the disk is full")
    assert threading.active_count() == before
    content.extend(b"a view that is still held forbids this")
