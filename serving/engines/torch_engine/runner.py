"""`Runner`: the interface between the scheduler and a network. It gets a batch of tokens, keeps
their keys and values in slots, and returns logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheSize:
    """The size of the KV cache of one release.

    A slot has an address range for a whole context. Memory is counted in blocks, which all slots
    share.
    """

    num_slots: int
    num_blocks: int
    """At least the number of blocks for one sequence of `context` tokens."""
    block_tokens: int
    block_bytes: int
    context: int
    """The largest number of tokens in a sequence, prompt included."""

    @property
    def memory_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def slot_tokens(self) -> int:
        """The length of a slot's address range: a context, in whole blocks."""
        return self.blocks(self.context) * self.block_tokens

    def blocks(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Consecutive tokens of one sequence that one step prefills."""

    slot: int
    start: int
    """The number of tokens that the slot already holds. If it holds more than `start` tokens, those
    after the first `start` are overwritten."""
    token_ids: tuple[int, ...]
    num_wanted: int
    """For how many of these tokens logits are computed. They are the last ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes. No slot appears twice, neither in `slots` nor in `chunks`."""

    slots: Sequence[int]
    """The slots of the sequences that decode, in ascending order. Numbers may be missing."""
    token_ids: Sequence[int]
    """The newest token of each slot in `slots`."""
    lengths: Sequence[int]
    """The number of tokens that each slot in `slots` already holds."""
    chunks: Sequence[Chunk]


class Runner(Protocol):
    """The network of a release, with its KV cache. Used by one thread only."""

    cache_size: KvCacheSize
    vocab_size: int

    def forward(self, batch: Batch) -> Tensor:
        """Compute one step. Returns float32 logits [rows, vocabulary]: one row for each decoding
        slot, then the requested rows of each chunk in order."""

    def warm_up(self) -> None:
        """Create what the first batch of each size would have to wait for, such as kernels."""

    def truncate(self, slot: int, length: int) -> None:
        """Free the memory that a slot has for tokens after its first `length`."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of `source` to `target`. `source` does not change."""
