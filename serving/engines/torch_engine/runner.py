"""`Runner`: the seam between scheduling and a network. Slots of keys and values in, logits out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class KvCacheSize:
    """What there is for the keys and values of one release.

    A slot has addresses for a whole context. Memory is counted in blocks, which all slots share.
    """

    num_slots: int
    num_blocks: int
    """At least as many as one sequence of `context` tokens takes."""
    block_tokens: int
    block_bytes: int
    context: int
    """Tokens that a sequence may have."""

    @property
    def memory_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    def blocks(self, num_tokens: int) -> int:
        """That `num_tokens` of one sequence take."""
        return -(-num_tokens // self.block_tokens)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of a sequence's tokens, read in one step."""

    slot: int
    start: int
    """Tokens of the same sequence that its slot already holds; what follows them is forgotten."""
    token_ids: tuple[int, ...]
    wants: str
    """Logits of which tokens: `none`, `last` or `all`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes. No slot is in it twice."""

    slots: Seq[int]
    """Those that decode, ascending, with gaps."""
    token_ids: Seq[int]
    """The newest token of each of `slots`."""
    lengths: Seq[int]
    """Tokens that each of `slots` already holds."""
    chunks: Seq[Chunk]


class Runner(Protocol):
    """A release's network with cache_size for its sequences. Used by one thread."""

    cache_size: KvCacheSize
    vocab_size: int
    shares_prefixes: bool
    """Whether a slot can be read from any of its tokens on, and copied in part."""

    def forward(self, batch: Batch) -> Tensor:
        """float32 logits [rows, vocabulary]: one row per decoding slot, then the wanted rows of
        each chunk in turn."""

    def warm_up(self) -> None:
        """Make what the first batches of each size would be held up for, where there is such."""

    def truncate(self, slot: int, length: int) -> None:
        """Give back the memory that a slot has for tokens after its first `length`."""

    def copy(self, source: int, target: int, length: int) -> None:
        """Make the first `length` tokens of `target` those of `source`, which stays. Called only
        where the runner shares prefixes."""
