"""`Rows`: the tensors of a batch. Also decides which rows attend in one operation, and which
operations run on several threads.

Before a parallel operation, the sleeping threads must be woken. This takes 10 to 150 µs. It takes
longer if other programs use the cores, and if threads spin for a shorter time before they sleep
(`GOMP_SPINCOUNT`). A decoding step has hundreds of operations that take less time than this on one
thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engines.torch_engine.runner import Batch, Chunk
from serving.engines.torch_engine.slots import KeyValueSlots

# oneDNN creates a kernel for each number of rows and keeps it (about 1 ms and 0.4 MB each). So
# the number of rows is padded to one of a few numbers. (n, step): up to n rows, it is padded to a
# multiple of step. Padding a few rows costs almost nothing, because a step reads every weight
# anyway. Padding more rows costs up to a fifth of the time of the matrix products.
_ROW_STEPS = ((2, 1), (16, 4), (32, 8), (64, 16), (256, 32))
_ROW_STEP_ABOVE = 64

# One more attention operation takes as long as reading this many more bytes of keys and values:
# about 40 µs.
_SPAN_BYTES = 1 << 19

# Elementwise operations on at least this number of rows are faster on several threads.
_PARALLEL_ROWS = 256
# Attention that reads or multiplies this much takes about 0.1 ms on one thread.
_PARALLEL_READ_BYTES = 1 << 18
_PARALLEL_MULTIPLICATIONS = 1 << 22


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Adjacent slots whose decoding rows attend in one operation. All of them read `length` tokens,
    one more than the longest of their sequences held."""

    rows: slice
    first: int
    end: int
    length: int
    places: Tensor | None
    """The slots of the rows, counted from `first`; None if the span has a row for every slot."""
    is_parallel: bool
    """Whether this attention runs on several threads."""
    mask: Tensor | None
    """[slots, 1, 1, length]: 0 where a row may look, else -inf; None if all rows may look
    everywhere. It is additive, because SDPA would convert a boolean mask again in every layer."""
    score_mask: Tensor | None
    """[slots * KV heads, 1, length] or [1, 1, 1]: the same as `mask`, to be added to the scores of
    each KV head. None if SDPA computes this attention."""


class Rows:
    """One row for each token. Decoding slots come first, then chunks, then padding if
    `is_padded`."""

    def __init__(self, batch: Batch, slots: KeyValueSlots, *, is_padded: bool) -> None:
        """`slots` are those of any layer."""
        self.row_indices = slots.row_indices(batch.slots, batch.lengths)
        """Where the decoding rows write their keys and values."""
        self.num_decoding = len(batch.token_ids)
        token_ids = list(batch.token_ids)
        positions = list(batch.lengths)
        wanted = list(range(self.num_decoding))
        self.chunks: list[tuple[Chunk, slice, Tensor | None]] = []
        """Each chunk with its rows, and the mask of its attention."""
        for chunk in batch.chunks:
            first, end = len(token_ids), len(token_ids) + len(chunk.token_ids)
            self.chunks.append((chunk, slice(first, end), _chunk_mask(chunk)))
            wanted.extend(range(end - chunk.num_wanted, end))
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.start + len(chunk.token_ids)))
        self.count, self.num_wanted = len(token_ids), len(wanted)
        self.is_parallel = self.count >= _PARALLEL_ROWS
        """Whether elementwise operations on these rows run on several threads."""
        if is_padded:
            token_ids.extend(_padding(self.count))
            positions.extend(_padding(self.count))
        self.token_ids = torch.tensor(token_ids)
        self.positions = torch.tensor(positions)
        self.wanted: Tensor | None = None
        if self.num_wanted < self.count:
            wanted.extend(_padding(self.num_wanted) if is_padded else [])
            self.wanted = torch.tensor(wanted, dtype=torch.long)
        span_tokens = _SPAN_BYTES // slots.shape.token_bytes(slots.dtype)
        self.spans = [
            _span(batch, rows, slots) for rows in adjacent(batch.slots, batch.lengths, span_tokens)
        ]


def is_parallel_worthwhile(*, read_bytes: int = 0, multiplications: int = 0) -> bool:
    """Whether attention of this size is faster on several threads."""
    return read_bytes > _PARALLEL_READ_BYTES or multiplications > _PARALLEL_MULTIPLICATIONS


def padded_count(num_rows: int) -> int:
    """The number of rows after padding."""
    step = next((step for end, step in _ROW_STEPS if num_rows <= end), _ROW_STEP_ABOVE)
    return -(-num_rows // step) * step


def _padding(num_rows: int) -> list[int]:
    return [0] * (padded_count(num_rows) - num_rows)


def adjacent(slots: Sequence[int], lengths: Sequence[int], span_tokens: int) -> list[slice]:
    """Divide the rows of ascending `slots` into runs. Each run attends in one operation.

    A run reads all slots from its first to its last one, each up to the longest sequence. This
    reads too much if slots are missing between them or if lengths differ. A new run costs as much
    as reading `span_tokens` tokens, and begins where this is less.
    """
    runs: list[slice] = []
    begin = longest = 0
    for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
        if row:
            width = slots[row - 1] - slots[begin] + 1
            joined = (slot - slots[begin] + 1) * max(longest, length)
            if joined > width * longest + length + span_tokens:
                runs.append(slice(begin, row))
                begin, longest = row, 0
        longest = max(longest, length)
    return [*runs, slice(begin, len(slots))] if slots else []


def _span(batch: Batch, rows: slice, slots: KeyValueSlots) -> Span:
    numbers, lengths = batch.slots[rows], batch.lengths[rows]
    first, end = numbers[0], numbers[-1] + 1
    length = max(lengths) + 1
    places = [number - first for number in numbers]
    is_whole = len(numbers) == end - first
    mask = None
    if any(each != length - 1 for each in lengths):
        # The result for a slot between them is not used, but it must not be NaN. So such a slot
        # looks at all columns.
        ends = [length] * (end - first)
        for place, each in zip(places, lengths, strict=True):
            ends[place] = each
        is_beyond = torch.arange(length) > torch.tensor(ends)[:, None]
        mask = torch.zeros(is_beyond.shape, dtype=slots.dtype)
        mask = mask.masked_fill_(is_beyond, -torch.inf)[:, None, None]
    score_mask = None
    if slots.dtype == torch.float32:
        # In bfloat16, oneDNN would create a kernel for each length.
        score_mask = torch.zeros(1, 1, 1) if mask is None else mask[:, 0]
        if mask is not None:
            score_mask = score_mask.repeat_interleave(slots.shape.num_heads, dim=0)
    return Span(
        rows=rows,
        first=first,
        end=end,
        length=length,
        places=None if is_whole else torch.tensor(places),
        is_parallel=is_parallel_worthwhile(
            read_bytes=(end - first) * length * slots.shape.token_bytes(slots.dtype)
        ),
        mask=mask,
        score_mask=score_mask,
    )


def _chunk_mask(chunk: Chunk) -> Tensor | None:
    """[rows, keys]: True where a row of the chunk may look; None if the chunk begins its
    sequence."""
    if chunk.start == 0:
        return None
    end = chunk.start + len(chunk.token_ids)
    return torch.arange(end) <= torch.arange(chunk.start, end)[:, None]
