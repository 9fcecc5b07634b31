"""Turns a conversation into tokens. The text is the prompt that a server makes of it."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

from pipeline.retrain.errors import BaseModelError, DataError
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

Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each of them whether training teaches the model to predict it (a learned
token)."""
_SAID = ("content", "reasoning_content", "reasoning", "thinking", "tool_calls")
"""The fields of a message that hold texts."""
END_TOKENS = 4
"""The end of an answer is among this many last tokens of it."""
_Marked = tuple[str, list[tuple[int, int]]]
"""A text, and the beginning and end of each answer in it."""


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

    def rendered(row: Row) -> list[_Marked] | DataError:
        assert template is not None
        try:
            return render(row, template)
        except DataError as error:
            return error

    try:
        template = chat_template(tokenizer)
    except BaseModelError as error:
        return [error] * len(rows)
    if template is None:
        return [
            BaseModelError(
                "the dataset has conversations, but the base model's tokenizer has no chat "
                "template; take a base model that has one, or rows of `prompt` and `completion`"
            )
        ] * len(rows)
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


def render(row: Row, template: ChatTemplate) -> list[_Marked]:
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
    for number in row.answers:
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
    shown = ["".join(text.split()) for text in rendered]

    def has(text: str) -> bool:
        ways = (
            "".join(each.split()) for each in (text, json.dumps(text, ensure_ascii=False)[1:-1])
        )
        return any(way in each for way in ways for each in shown)

    said: list[tuple[str, Iterable[str]]] = [
        ("the tools", [tool["function"]["name"] for tool in conversation.tools])
    ]
    said += [
        (f"message {number} ({message['role']})", _texts([message.get(key) for key in _SAID]))
        for number, message in enumerate(conversation.messages, 1)
    ]
    for whose, texts in said:
        for text in texts:
            if not has(text):
                raise DataError(
                    f"the chat template of the base model leaves out {text[:60]!r} of {whose}; "
                    "take a base model whose template has a place for it, or rows without it",
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
