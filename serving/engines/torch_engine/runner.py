"""`Runner`: the interface between the scheduler and a network. It gets a batch of tokens, keeps
their keys and values in slots, and returns logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from serving.engines.torch_engine.slots import KeyValueSlots, KvCacheSize


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
    slots: Sequence[KeyValueSlots]
    """The slots of each layer."""
    vocab_size: int

    def forward(self, batch: Batch) -> Tensor:
        """Compute one step. Returns float32 logits [rows, vocabulary]: one row for each decoding
        slot, then the requested rows of each chunk in order."""
