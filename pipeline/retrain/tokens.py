"""Turns rows into token sequences, and marks the learned tokens: those that training teaches the
model to predict.

In plain text, every token is learned. With `prompt` and `completion`, only the completion is
learned. In `messages`, only the words of the assistant are learned. The prompt is tokenized apart
from the completion, because the server also tokenizes a prompt by itself.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.retrain.chat import END_TOKENS, Encoded, answer_end, encode, runs
from pipeline.retrain.errors import BaseModelError, DataError
from pipeline.retrain.rows import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of a row, or of one piece of a row that is too long for one sequence."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]
    """For each token, whether the model learns to predict it. Always False for the first token,
    because nothing precedes it."""
    row: int
    """The index of the row that the tokens come from."""
    labels: tuple[int, ...] | None = None
    """The real token ids, if `token_ids` holds other ids in their place (`trunk.py`). Else None."""

    @property
    def num_learned(self) -> int:
        return sum(self.learned)


def sequences(
    rows: Iterable[Row],
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    *,
    skip_refused: bool = False,
) -> list[TokenSequence]:
    """The token sequences of `rows`, each of at most `max_length` tokens. A sequence without a
    learned token is left out.

    Raises DataError if the chat template refuses a conversation, and BaseModelError if the
    tokenizer has no chat template for a conversation. skip_refused: leave out such a conversation
    instead.
    """
    found = []
    for index, row in enumerate(rows):
        try:
            pieces = list(_pieces(row, tokenizer, max_length))
        except (DataError, BaseModelError):
            if not skip_refused:
                raise
            continue
        for token_ids, learned in pieces:
            learned[0] = False
            if any(learned):
                found.append(TokenSequence(tuple(token_ids), tuple(learned), index))
    return found


def answer_ends(
    sequences: Iterable[TokenSequence], tokenizer: "PreTrainedTokenizerBase"
) -> frozenset[int]:
    """The tokens that end the answers in these sequences. An answer that was cut has no end."""
    tails = {
        each.token_ids[first:last][-END_TOKENS:]
        for each in sequences
        for first, last in runs(each.learned)
    }
    found = (answer_end(tail, tokenizer) for tail in tails)
    return frozenset(end for end in found if end is not None)


def _pieces(row: Row, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Iterable[Encoded]:
    if row.text is not None:
        return _text(row.text, tokenizer, max_length)
    pair = row.as_completion
    if pair is None or (row.messages is not None and tokenizer.chat_template is not None):
        return _chat(row, tokenizer, max_length)
    return [_completion(*pair, tokenizer, max_length)]


def _ids(
    tokenizer: "PreTrainedTokenizerBase", text: str, *, add_special_tokens: bool = True
) -> list[int]:
    # If verbose were True, the tokenizer would warn of every text that is longer than the context.
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    return ids


def _text(text: str, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> list[Encoded]:
    token_ids = [*_ids(tokenizer, text), tokenizer.eos_token_id]
    # Each piece begins with the last token of the piece before it. The first token of a piece is
    # not predicted, so every token except the first one of the text is predicted exactly once.
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
    """Cut the prompt (`before`) and the answer (`after`) so that both fit into `max_length`. A
    prompt of up to half of `max_length` stays whole, because a model that learns the answer to the
    end of a prompt does not give this answer to the whole prompt. A longer prompt loses its
    beginning. The answer loses its end."""
    after = after[: max(max_length - len(before), max_length // 2)]
    before = before[max(0, len(before) + len(after) - max_length) :]
    return before + after, [False] * len(before) + [True] * len(after)


def _chat(row: Row, tokenizer: "PreTrainedTokenizerBase", max_length: int) -> Iterator[Encoded]:
    """A conversation that is too long gives one sequence for each answer: the answer, with as much
    as fits of the conversation before it."""
    for token_ids, learned in encode(row, tokenizer):
        if len(token_ids) <= max_length:
            yield token_ids, learned
            continue
        for first, last in runs(learned):
            yield _fitting(token_ids[:first], token_ids[first:last], max_length)
