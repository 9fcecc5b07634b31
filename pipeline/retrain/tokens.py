"""Rows → token sequences, with the positions that are learned from marked.

Text is learned whole; of `prompt` and `completion` only the completion, of `messages` only what the
assistant says. A prompt is tokenized by itself, as the server will do it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from pipeline.retrain.chat import Encoded, encode
from pipeline.retrain.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Token ids of one row, or of one piece of a long one."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]
    """For each token, whether the model is to predict it. Never true for the first one."""
    row: int
    """Index of the row that it comes from."""
    labels: tuple[int, ...] | None = None
    """The token ids, where `token_ids` are other ids that stand for them."""

    @property
    def num_learned(self) -> int:
        return sum(self.learned)


def sequences(
    rows: Iterable[Row], tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> list[TokenSequence]:
    """The rows as token sequences of at most `max_length`, each with something to learn.

    Raises DataError for a conversation that the chat template refuses, BaseModelError without one.
    """
    found = []
    for index, row in enumerate(rows):
        pieces: Iterable[Encoded]
        if row.text is not None:
            pieces = _text(row.text, tokenizer, max_length)
        elif row.messages is not None:
            pieces = _chat(row, tokenizer, max_length)
        else:
            pieces = [_completion(row.prompt or "", row.completion or "", tokenizer, max_length)]
        for token_ids, learned in pieces:
            learned[0] = False
            if any(learned):
                found.append(TokenSequence(tuple(token_ids), tuple(learned), index))
    return found


def _ids(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True
) -> list[int]:
    # Not verbose: it would warn of every text that is longer than the context.
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    return ids


def _text(text: str, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Encoded]:
    token_ids = [*_ids(tokenizer, text), tokenizer.eos_token_id]
    # Pieces share one token, so that every token but the first is predicted once.
    starts = range(0, max(1, len(token_ids) - 1), max_length - 1)
    pieces = [token_ids[start : start + max_length] for start in starts]
    return [(piece, [True] * len(piece)) for piece in pieces]


def _completion(
    prompt: str, completion: str, tokenizer: "PreTrainedTokenizerBase", max_length: int
) -> Encoded:
    before = _ids(tokenizer, prompt)
    after = [*_ids(tokenizer, completion, add_special_tokens=False), tokenizer.eos_token_id]
    return _fitting(before or [tokenizer.eos_token_id], after, max_length)


def _fitting(before: list[int], after: list[int], max_length: int) -> Encoded:
    """What is learned loses its end, and what stands before it its beginning."""
    after = after[: max_length - 1]
    before = before[-(max_length - len(after)) :]
    return before + after, [False] * len(before) + [True] * len(after)


def _chat(row: Row, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Iterator[Encoded]:
    """What is too long gives a piece for each answer, with as much as fits of what leads to it."""
    for token_ids, learned in encode(row, tokenizer):
        if len(token_ids) <= max_length:
            yield token_ids, learned
            continue
        for first, last in _runs(learned):
            yield _fitting(token_ids[:first], token_ids[first:last], max_length)


def _runs(learned: list[bool]) -> Iterator[tuple[int, int]]:
    """First and last, which is not of it, of each stretch of tokens that are learned."""
    for is_learned, run in groupby(range(len(learned)), key=learned.__getitem__):
        places = list(run)
        if is_learned:
            yield places[0], places[-1] + 1
