"""Which operations of a step are worth more than one thread.

A thread that waited has to be woken for the next parallel operation: 10 to 150 µs, the longer the
more else runs on the cores (and the less it spins before it sleeps, `GOMP_SPINCOUNT`). A decoding
step has hundreds of operations that take less alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PARALLEL_ROWS = 256
"""From here on elementwise operations gain by more threads."""
# Of attention, about 0.2 ms on one thread.
_PARALLEL_READ_BYTES = 1 << 21
_PARALLEL_MULTIPLICATIONS = 1 << 22


@contextmanager
def use(num_threads: int) -> Iterator[None]:
    """Operations of this thread run on so many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def is_parallel_worthwhile(*, read_bytes: int = 0, multiplications: int = 0) -> bool:
    """Whether an attention gains by more threads."""
    return read_bytes > _PARALLEL_READ_BYTES or multiplications > _PARALLEL_MULTIPLICATIONS
