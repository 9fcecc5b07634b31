"""Counts the tokens of rows, and finds the rows that are too long to be learned whole."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.retrain.rows import Row
from pipeline.retrain.tokens import sequences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNCUT_LENGTH = 1 << 30
"""A length that is greater than the number of tokens in any row. `sequences` cuts no row at this
length, so all tokens of a row are counted."""


@dataclass(frozen=True, kw_only=True)
class RowLengths:
    num_tokens: int
    """The number of tokens in all rows, also those that training cuts off."""
    cut: tuple[Row, ...]
    """The rows with an answer (all rows except plain text) that are too long. A part of each of
    them is not learned."""


def row_lengths(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
) -> RowLengths:
    """Count the tokens. Raises DataError and BaseModelError, as `sequences` does."""
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for piece in sequences(rows, tokenizer, max_length):
        sizes[piece.row].append(len(piece.token_ids))
    num_tokens, cut = 0, []
    for index, pieces in sizes.items():
        row = rows[index]
        if not row.is_counted:
            # Each further piece of a text begins with the last token of the piece before it.
            num_tokens += sum(pieces) - (len(pieces) - 1)
            continue
        if max(pieces) == max_length:
            # The row fits exactly, or was cut. To know, tokenize it again.
            pieces = [len(each.token_ids) for each in sequences([row], tokenizer, UNCUT_LENGTH)]
            if max(pieces) > max_length:
                cut.append(row)
        num_tokens += sum(pieces)
    return RowLengths(num_tokens=num_tokens, cut=tuple(cut))
