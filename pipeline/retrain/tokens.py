"""Turns rows into token sequences, and marks the learned tokens: those that training teaches the
model to predict.

In plain text, every token is learned. With `prompt` and `completion`, only the completion is
learned. In `messages`, only the words of the assistant are learned. The prompt is tokenized apart
from the completion, because the server also tokenizes a prompt by itself.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress

from transformers import PreTrainedTokenizerBase

from pipeline.retrain.chat import END_TOKENS, Encoded, answer_end, encode, runs
from pipeline.retrain.errors import BaseModelError, DataError, fail
from pipeline.retrain.rows import Row

BATCH_ROWS = 500
"""So many rows are tokenized in one call: quicker than one by one, and on all cores."""
_UNCUT = 1 << 30
"""More tokens than any row has."""


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

    @property
    def learned_ids(self) -> tuple[int, ...]:
        """The learned tokens."""
        return tuple(compress(self.labels or self.token_ids, self.learned))


def leave_out(_: DataError | BaseModelError) -> None:
    """For `sequences`: a row that the chat template refuses has no sequence."""


def sequences(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    *,
    on_refused: Callable[[DataError | BaseModelError], None] = fail,
) -> list[TokenSequence]:
    """The token sequences of `rows`, each of at most `max_length` tokens. A sequence without a
    learned token is left out.

    on_refused: called with a DataError if the chat template refuses a conversation, and with a
    BaseModelError if the tokenizer has no chat template for it. If it raises nothing, the
    conversation is left out.
    """
    found = []
    for start in range(0, len(rows), BATCH_ROWS):
        some = rows[start : start + BATCH_ROWS]
        written = [_written(row, tokenizer) for row in some]
        pairs = [each for each in written if each is not None]
        asked = _ids(tokenizer, [before for before, _ in pairs])
        answers = _ids(tokenizer, [after for _, after in pairs], add_special_tokens=False)
        encoded = zip(asked, answers, strict=True)
        others = [row for row, each in zip(some, written, strict=True) if each is None]
        talks = iter(encode(others, tokenizer) if others else ())
        for index, (row, pair) in enumerate(zip(some, written, strict=True), start):
            if pair is not None:
                pieces = _pieces(row, *next(encoded), tokenizer.eos_token_id, max_length)
            elif isinstance(talk := next(talks), list):
                pieces = [each for one in talk for each in _cut(*one, max_length)]
            else:
                on_refused(talk)
                continue
            for token_ids, learned in pieces:
                learned[0] = False
                if any(learned):
                    found.append(TokenSequence(tuple(token_ids), tuple(learned), index))
    return found


def row_lengths(
    rows: Sequence[Row],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    on_refused: Callable[[DataError | BaseModelError], None] = fail,
) -> tuple[int, list[Row]]:
    """The number of tokens in all rows, and the rows with an answer that have more than
    `max_length` tokens: a part of each of them is not learned."""
    found = sequences(rows, tokenizer, _UNCUT, on_refused=on_refused)
    long = {each.row for each in found if len(each.token_ids) > max_length}
    cut = [rows[index] for index in sorted(long) if rows[index].is_counted]
    return sum(len(each.token_ids) for each in found), cut


def answer_ends(
    sequences: Iterable[TokenSequence], tokenizer: PreTrainedTokenizerBase
) -> frozenset[int]:
    """The tokens that end the answers in these sequences. An answer that was cut has no end."""
    tails = {
        each.token_ids[first:last][-END_TOKENS:]
        for each in sequences
        for first, last in runs(each.learned)
    }
    found = (answer_end(tail, tokenizer) for tail in tails)
    return frozenset(end for end in found if end is not None)


def _written(row: Row, tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """The text or prompt of the row, and its answer. None for a conversation that the chat template
    renders."""
    if row.text is not None:
        return row.text, ""
    pair = row.as_completion
    if pair is None or (row.messages is not None and tokenizer.chat_template is not None):
        return None
    return pair


def _ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], *, add_special_tokens: bool = True
) -> list[list[int]]:
    if not texts:
        return []
    # If verbose were True, the tokenizer would warn of every text that is longer than the context.
    ids: list[list[int]] = tokenizer(texts, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    return ids


def _pieces(
    row: Row, asked: list[int], answer: list[int], end: int, max_length: int
) -> list[Encoded]:
    """asked: the tokens of the text or of the prompt. end: the token that ends a sequence."""
    if row.text is None:
        return [_fitting(asked or [end], [*answer, end], max_length)]
    token_ids = [*asked, end]
    # Each piece begins with the last token of the piece before it. The first token of a piece is
    # not predicted, so every token except the first one of the text is predicted exactly once.
    starts = range(0, max(1, len(token_ids) - 1), max_length - 1)
    pieces = [token_ids[start : start + max_length] for start in starts]
    return [(piece, [True] * len(piece)) for piece in pieces]


def _fitting(before: list[int], after: list[int], max_length: int) -> Encoded:
    """Cut the prompt (`before`) and the answer (`after`) so that both fit into `max_length`. A
    prompt of up to half of `max_length` stays whole, because a model that learns the answer to the
    end of a prompt does not give this answer to the whole prompt. A longer prompt loses its
    beginning. The answer loses its end."""
    after = after[: max(max_length - len(before), max_length // 2)]
    before = before[max(0, len(before) + len(after) - max_length) :]
    return before + after, [False] * len(before) + [True] * len(after)


def _cut(token_ids: list[int], learned: list[bool], max_length: int) -> Iterator[Encoded]:
    """A conversation that is too long gives one sequence for each answer: the answer, with as much
    as fits of the conversation before it."""
    if len(token_ids) <= max_length:
        yield token_ids, learned
        return
    for first, last in runs(learned):
        yield _fitting(token_ids[:first], token_ids[first:last], max_length)
