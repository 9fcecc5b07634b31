"""`Runner`: the seam between scheduling and a network. Slots of keys and values in, logits out."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """A run of a prompt's tokens, read in one step."""

    slot: int
    start: int
    """Tokens of the same sequence that its slot already holds."""
    token_ids: tuple[int, ...]
    wants: str
    """Logits of which tokens: `none`, `last` or `all`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """What one step computes. Decoding slots are 0, 1, …; the chunks' slots come after them."""

    token_ids: Seq[int]
    """The newest token of each decoding slot."""
    lengths: Seq[int]
    """Tokens that each decoding slot already holds."""
    chunks: Seq[Chunk]


class Runner(Protocol):
    """A release's network with room for `num_slots` sequences. Used by one thread."""

    num_slots: int
    context: int
    """Tokens that a slot has room for."""
    vocab_size: int

    def forward(self, batch: Batch) -> Tensor:
        """float32 logits [rows, vocabulary]: one row per decoding slot, then the wanted rows of
        each chunk in turn."""

    def warm_up(self) -> None:
        """Make what the first batches of each size would be held up for, where there is such."""

    def move(self, source: int, target: int, length: int) -> None:
        """Make slot `target` what `source` is; `source` is free afterwards."""
