"""Decides which operations of a step run on several threads.

Before a parallel operation, the sleeping threads must be woken. This takes 10 to 150 µs. It takes
longer if other programs use the cores, and if threads spin for a shorter time before they sleep
(`GOMP_SPINCOUNT`). A decoding step has hundreds of operations that take less time than this on one
thread.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARALLEL_ROWS = 256
"""Elementwise operations on at least this number of rows are faster on several threads."""
# Attention that reads or multiplies this much takes about 0.1 ms on one thread.
_PARALLEL_READ_BYTES = 1 << 18
_PARALLEL_MULTIPLICATIONS = 1 << 22


@contextmanager
def use(num_threads: int) -> Iterator[None]:
    """In the `with` block, operations of the calling thread run on `num_threads` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_parallel_worthwhile(*, read_bytes: int = 0, multiplications: int = 0) -> bool:
    """Whether attention of this size is faster on several threads."""
    return read_bytes > _PARALLEL_READ_BYTES or multiplications > _PARALLEL_MULTIPLICATIONS
