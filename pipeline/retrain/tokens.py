"""Turns rows into token sequences, and marks the learned tokens: those that training teaches the
model to predict.

In plain text, every token is learned. With `prompt` and `completion`, only the completion is
learned. In `messages`, only the words of the assistant are learned; their text is the prompt that a
server makes of them. A prompt is tokenized apart from its completion, because the server also
tokenizes a prompt by itself.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import compress, groupby
from typing import TYPE_CHECKING, Any

from pipeline.retrain.errors import BaseModelError, DataError, fail
from pipeline.retrain.rows import Row
from serving.chat_template import (
    PROMPT_DATE,
    ChatTemplate,
    ChatTemplateError,
    Conversation,
    ConversationError,
    in_time,
    normalise,
)
from serving.errors import ReleaseError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BATCH_ROWS = 500
"""So many rows are tokenized in one call: quicker than one by one, and on all cores."""
_UNCUT = 1 << 30
"""More tokens than any row has."""
Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each of them whether training teaches the model to predict it (a learned
token)."""
_SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""The fields of a message that hold texts."""
END_TOKENS = 4
"""The end of an answer is among this many last tokens of it."""
_Marked = tuple[str, list[tuple[int, int]]]
"""A text, and the beginning and end of each answer in it."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of a row, or of one piece of a row that is too long for one sequence."""

    token_ids: tuple[int, ...]
    learned: tuple[bool, ...]
    """For each token, whether the model learns to predict it. Always False for the first token,
    because nothing precedes it."""
    row: int
    """The index of the row that the tokens come from."""
    is_noisy: bool = True
    """Whether training may add noise to the embeddings of the tokens."""

    @property
    def num_learned(self) -> int:
        return sum(self.learned)

    @property
    def learned_ids(self) -> tuple[int, ...]:
        """The learned tokens."""
        return tuple(compress(self.token_ids, self.learned))


def leave_out(_: DataError | BaseModelError) -> None:
    """For `sequences`: a row that the chat template refuses has no sequence."""


def sequences(
    rows: Sequence[Row],
    tokenizer: "PreTrainedTokenizerBase",
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
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    on_refused: Callable[[DataError | BaseModelError], None] = fail,
) -> tuple[int, list[Row]]:
    """The number of tokens in all rows, and the rows with an answer that have more than
    `max_length` tokens: a part of each of them is not learned."""
    found = sequences(rows, tokenizer, _UNCUT, on_refused=on_refused)
    long = {each.row for each in found if len(each.token_ids) > max_length}
    cut = [rows[index] for index in sorted(long) if rows[index].has_answer]
    return sum(len(each.token_ids) for each in found), cut


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


def _written(row: Row, tokenizer: "PreTrainedTokenizerBase") -> tuple[str, str] | None:
    """The text or prompt of the row, and its answer. None for a conversation that the chat template
    renders."""
    if row.text is not None:
        return row.text, ""
    pair = row.as_completion
    if pair is None or (row.messages is not None and tokenizer.chat_template is not None):
        return None
    return pair


def _ids(
    tokenizer: "PreTrainedTokenizerBase", texts: list[str], *, add_special_tokens: bool = True
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


def encode(
    rows: Sequence[Row], tokenizer: "PreTrainedTokenizerBase"
) -> list[list[Encoded] | DataError | BaseModelError]:
    """Encode the conversation of each row. The words of the assistant are the learned tokens.

    Usually, a conversation is one sequence. But some templates write an earlier answer differently
    when more turns follow, for example without its reasoning. Then the result is one sequence for
    each answer, rendered as if the conversation ended there.

    In the place of a conversation is a BaseModelError if there is no chat template, and a DataError
    if the template refuses the row, leaves out a part of it, or ends an answer with no token that
    could end it.
    """
    try:
        template = chat_template(tokenizer)
        if template is None:
            raise BaseModelError(
                "the dataset has conversations, but the base model's tokenizer has no chat "
                "template; take a base model that has one, or rows of `prompt` and `completion`"
            )
    except BaseModelError as error:
        return [error] * len(rows)

    def rendered(row: Row) -> list[_Marked] | DataError:
        try:
            return _render(row, template)
        except DataError as error:
            return error

    marked = in_time(lambda: list(map(rendered, rows)), len(rows))
    all_marked = [each for found in marked if isinstance(found, list) for each in found]
    encoded = iter(_tokenized(all_marked, tokenizer))
    return [
        found
        if isinstance(found, DataError)
        else _ended(row, [next(encoded) for _ in found], tokenizer)
        for row, found in zip(rows, marked, strict=True)
    ]


def _ended(
    row: Row, found: list[Encoded], tokenizer: "PreTrainedTokenizerBase"
) -> list[Encoded] | DataError:
    """The sequences of a row, or why a server would not know where an answer ends."""
    for answer in (ids[first:last] for ids, learned in found for first, last in runs(learned)):
        if answer_end(answer, tokenizer) is None:
            return DataError(
                "the chat template of the base model ends an answer with "
                f"{tokenizer.decode(answer[-3:])!r}, which is no special token, so a server would "
                "not know where it ends; let the template write {{ eos_token }} after each answer",
                row.place,
            )
    return found


def _render(row: Row, template: ChatTemplate) -> list[_Marked]:
    """The texts of the conversation, with the answers to learn. Raises DataError, as `encode`."""
    try:
        conversation = normalise(row.taught, row.tools)
        texts = _answers(row, conversation, template)
    except ConversationError as error:
        raise DataError(str(error), row.place) from None
    except ChatTemplateError as error:
        raise DataError(
            f"the chat template of the base model refuses it ({error})", row.place
        ) from error
    _check_complete(row, conversation, [text for text, _ in texts])
    return texts


def chat_template(tokenizer: "PreTrainedTokenizerBase") -> ChatTemplate | None:
    """The chat template of `tokenizer`, as a server would have it. Raises BaseModelError."""
    sources = tokenizer.chat_template
    named = sources if isinstance(sources, dict) else {"default": sources}
    if named.get("default") is None:
        return None
    special = tuple((name, str(text)) for name, text in tokenizer.special_tokens_map.items())
    try:
        return _compiled(named["default"], special, tokenizer.init_kwargs.get(PROMPT_DATE))
    except ReleaseError as error:
        raise BaseModelError(f"the base model's tokenizer: {error}") from error


@lru_cache(8)
def _compiled(source: str, special: tuple[tuple[str, str], ...], day: str | None) -> ChatTemplate:
    return ChatTemplate(source, dict(special), day)


def answer_end(answer: Sequence[int], tokenizer: "PreTrainedTokenizerBase") -> int | None:
    """The special token that ends an answer. Spaces may follow it. None if there is none."""
    for token_id in reversed(answer[-END_TOKENS:]):
        if tokenizer.decode([token_id]).strip():
            is_special = not tokenizer.decode([token_id], skip_special_tokens=True)
            return token_id if is_special else None
    return None


def runs(learned: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """The start and the end (exclusive) of each run of learned tokens."""
    for is_learned, run in groupby(range(len(learned)), key=learned.__getitem__):
        places = list(run)
        if is_learned:
            yield places[0], places[-1] + 1


def _answers(row: Row, conversation: Conversation, template: ChatTemplate) -> list[_Marked]:
    whole = template.render(conversation, add_generation_prompt=False)
    found = []
    for number in row.answer_numbers:
        before, until = (
            replace(conversation, messages=conversation.messages[:count])
            for count in (number, number + 1)
        )
        asked = template.render(before)
        answered = template.render(until, add_generation_prompt=False)
        if not answered.startswith(asked):
            raise DataError(
                "the chat template of the base model renders the prompt of an answer differently "
                "when the answer follows, so a server would never ask what the row teaches; take "
                "another template, or write the reasoning that this one expects",
                row.place,
            )
        found.append((answered, [(len(asked), len(answered))]))
    if all(whole.startswith(answered) for answered, _ in found):
        return [(whole, [span for _, (span,) in found])]
    return found


def _tokenized(
    marked: Sequence[_Marked], tokenizer: "PreTrainedTokenizerBase"
) -> Iterator[Encoded]:
    if not marked:
        return
    encoded = tokenizer(
        [text for text, _ in marked],
        add_special_tokens=False,
        return_offsets_mapping=True,
        verbose=False,
    )
    offsets = encoded["offset_mapping"]
    for (_, spans), ids, places in zip(marked, encoded["input_ids"], offsets, strict=True):
        yield (
            ids,
            [
                any(first <= start < last for first, last in spans) and start < end
                for start, end in places
            ],
        )


def _check_complete(row: Row, conversation: Conversation, rendered: Sequence[str]) -> None:
    """Raises DataError if a text of the conversation is in none of the rendered ones. A template
    often leaves out what it does not know, without an error. Spaces do not count: many templates
    strip texts."""
    shown = "\n".join("".join(text.split()) for text in rendered)
    names = [tool["function"]["name"] for tool in conversation.tools]
    said = [[message.get(key) for key in _SAID] for message in conversation.messages]
    for text in _texts([names, said]):
        for_json = json.dumps(text, ensure_ascii=False)[1:-1]
        if not any("".join(each.split()) in shown for each in (text, for_json)):
            raise DataError(
                f"the chat template of the base model leaves out {text[:60]!r}; take a base model "
                "whose template has a place for it, or rows without it",
                row.place,
            )


def _texts(value: Any, key: str = "") -> Iterator[str]:
    """The texts in a message or in the arguments of a call."""
    if key == "arguments" and isinstance(value, str):
        value = json.loads(value)
    if isinstance(value, str) and key not in ("type", "id"):
        yield value
    elif isinstance(value, dict | list):
        for name, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(each, str(name))
