"""`Rows`: a batch as tensors, and which of its rows attend together."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from serving.engines.torch_engine import threads
from serving.engines.torch_engine.runner import Batch, Chunk

# oneDNN makes a kernel for each number of rows, at about a millisecond and 0.4 MB, and keeps it:
# numbers are padded_count up. (Up to so many rows, to multiples of this.) Few rows cost about the same,
# since a step reads every weight whatever their number; more cost up to a fifth of the matrices'.
_ROW_STEPS = ((2, 1), (16, 4), (32, 8), (64, 16), (256, 32))
_ROW_STEP_ABOVE = 64

# An attention over one more span of slots takes as long as reading this many bytes of keys and
# values more: about 40 µs.
_SPAN_BYTES = 1 << 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Slots side by side whose decoding rows attend in one operation, as far as the longest."""

    rows: slice
    first: int
    end: int
    length: int
    places: Tensor | None
    """Which of the slots the rows are; None where they are all of them."""
    is_parallel: bool
    """Whether that is worth more than one thread."""
    mask: Tensor | None
    """0 where a slot's row may look, else -inf, [slots, 1, 1, length]; None where all may look
    everywhere. Additive, since SDPA would turn a boolean one into that again in every layer."""


class Rows:
    """One row per token, decoding slots first, then padding where padded_count."""

    def __init__(
        self,
        batch: Batch,
        *,
        row_indices: Tensor,
        token_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        is_padded: bool,
    ) -> None:
        """`places` are those of the decoding rows' keys and values; `token_bytes` those of one
        token's in one layer."""
        self.row_indices = row_indices
        self.num_decoding = len(batch.token_ids)
        token_ids = list(batch.token_ids)
        positions = list(batch.lengths)
        wanted = list(range(self.num_decoding))
        for chunk in batch.chunks:
            end = len(token_ids) + len(chunk.token_ids)
            if chunk.wants == "all":
                wanted.extend(range(len(token_ids), end))
            elif chunk.wants == "last":
                wanted.append(end - 1)
            token_ids.extend(chunk.token_ids)
            positions.extend(range(chunk.start, chunk.start + len(chunk.token_ids)))
        self.count, self.num_wanted = len(token_ids), len(wanted)
        if is_padded:
            token_ids.extend(_padding(self.count))
            positions.extend(_padding(self.count))
        self.token_ids = torch.tensor(token_ids, device=device)
        self.positions = torch.tensor(positions, device=device)
        self.wanted: Tensor | None = None
        if self.num_wanted < self.count:
            wanted.extend(_padding(self.num_wanted) if is_padded else [])
            self.wanted = torch.tensor(wanted, dtype=torch.long, device=device)
        self.spans = [
            _span(batch, rows, token_bytes, dtype, device)
            for rows in adjacent(batch.slots, batch.lengths, _SPAN_BYTES // token_bytes)
        ]
        self.chunks = [(chunk, _chunk_mask(chunk, device)) for chunk in batch.chunks]


def padded_count(num_rows: int) -> int:
    """The number of rows that so many are computed as."""
    step = next((step for end, step in _ROW_STEPS if num_rows <= end), _ROW_STEP_ABOVE)
    return -(-num_rows // step) * step


def _padding(num_rows: int) -> list[int]:
    return [0] * (padded_count(num_rows) - num_rows)


def adjacent(slots: Seq[int], lengths: Seq[int], span_tokens: int) -> list[slice]:
    """Rows of ascending `slots`, split into runs that attend together.

    A run reads every slot between its first and its last one as far as its longest, which costs
    more than it saves where a gap is wide or the lengths differ: one more run costs as much as
    reading `span_tokens` tokens.
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


def _span(
    batch: Batch, rows: slice, token_bytes: int, dtype: torch.dtype, device: torch.device
) -> Span:
    slots, lengths = batch.slots[rows], batch.lengths[rows]
    first, end = slots[0], slots[-1] + 1
    length = max(lengths) + 1
    places = [slot - first for slot in slots]
    is_whole = len(slots) == end - first
    mask = None
    if any(each != length - 1 for each in lengths):
        # Nobody asks what a slot between them would find; it must only not be NaN.
        ends = [length] * (end - first)
        for place, each in zip(places, lengths, strict=True):
            ends[place] = each
        is_beyond = torch.arange(length, device=device) > torch.tensor(ends, device=device)[:, None]
        mask = torch.zeros(is_beyond.shape, dtype=dtype, device=device)
        mask = mask.masked_fill_(is_beyond, -torch.inf)[:, None, None]
    return Span(
        rows=rows,
        first=first,
        end=end,
        length=length,
        places=None if is_whole else torch.tensor(places, device=device),
        is_parallel=threads.is_parallel_worthwhile(read_bytes=(end - first) * length * token_bytes),
        mask=mask,
    )


def _chunk_mask(chunk: Chunk, device: torch.device) -> Tensor | None:
    """True where a chunk's row may look, [rows, keys]; None for a prompt's beginning."""
    if chunk.start == 0:
        return None
    end = chunk.start + len(chunk.token_ids)
    keys = torch.arange(end, device=device)
    return keys <= torch.arange(chunk.start, end, device=device)[:, None]
