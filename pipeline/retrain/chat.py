"""Turns a conversation into tokens. `transformers` renders the text with the tokenizer's chat
template."""

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipeline.retrain.errors import BaseModelError, DataError
from pipeline.retrain.rows import Row
from serving.conversation import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encoded = tuple[list[int], list[bool]]
"""Token ids, and for each of them whether training teaches the model to predict it (a learned
token)."""
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag that some templates put before the words of the assistant, to mark these words."""


def encode(row: Row, tokenizer: "PreTrainedTokenizerBase") -> list[Encoded]:
    """Encode the conversation of `row`. The words of the assistant are the learned tokens.

    Usually, the result is one sequence with the whole conversation. But some templates write an
    earlier answer differently when more turns follow, for example without its reasoning. Then the
    result is one sequence for each answer, rendered as if the conversation ended there.

    Raises BaseModelError if there is no chat template, and DataError if the template refuses the
    row or leaves out a part of it.
    """
    if tokenizer.chat_template is None:
        raise BaseModelError(
            "the dataset has conversations, but the base model's tokenizer has no chat template; "
            "take a base model that has one, or rows of `prompt` and `completion`"
        )
    tools = list(row.tools) if row.tools else None
    messages = list(row.messages or ())

    def render(turns: list[Message], **options: Any) -> Any:
        try:
            return tokenizer.apply_chat_template(
                [dict(message) for message in turns], tools=tools, **options
            )
        except Exception as error:
            # A template is a program, so it may raise any exception.
            reason = " ".join(str(error).split()) or repr(error)
            raise DataError(
                f"{row.place}: the chat template of the base model refuses it ({reason})"
            ) from error

    whole: str = render(messages, tokenize=False)
    _check_complete(row, whole)
    if not row.masked and _GENERATION.search(tokenizer.get_chat_template(tools=tools)):
        marked = render(messages, return_dict=True, return_assistant_tokens_mask=True)
        return [(marked["input_ids"], [bool(mask) for mask in marked["assistant_masks"]])]
    spans = _answers(row, messages, render)
    if all(whole.startswith(answered) for _, answered in spans):
        return [
            _marked(whole, [(len(asked), len(answered)) for asked, answered in spans], tokenizer)
        ]
    return [
        _marked(answered, [(len(asked), len(answered))], tokenizer) for asked, answered in spans
    ]


def _answers(
    row: Row, messages: list[Message], render: Callable[..., Any]
) -> list[tuple[str, str]]:
    """For each answer, two texts: the prompt for this answer, and the prompt with the answer."""
    found = []
    for number in row.answers:
        asked: str = render(messages[:number], tokenize=False, add_generation_prompt=True)
        answered: str = render(messages[: number + 1], tokenize=False)
        if not answered.startswith(asked):
            raise DataError(
                f"{row.place}: the chat template of the base model renders the prompt of an answer "
                "differently when the answer follows, so that answers cannot be told from prompts; "
                "take a template with {% generation %}"
            )
        found.append((asked, answered))
    return found


def _marked(
    text: str, spans: list[tuple[int, int]], tokenizer: "PreTrainedTokenizerBase"
) -> Encoded:
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    learned = [
        any(first <= start < last for first, last in spans) and start < end
        for start, end in encoded["offset_mapping"]
    ]
    return encoded["input_ids"], learned


def _check_complete(row: Row, rendered: str) -> None:
    """Raises DataError if the rendered text lacks a tool, a call of a tool, or a message of a rare
    role. A template that does not know tools or a role often leaves them out without an error."""

    def has(text: str) -> bool:
        return text.strip() in rendered or json.dumps(text)[1:-1].strip() in rendered

    missing = [f"the tool {name!r}" for name in map(_name, row.tools or ()) if not has(name)]
    for message in row.messages or ():
        calls = [_name(call) for call in message.get("tool_calls") or ()]
        missing += [f"the call of {name!r}" for name in calls if not has(name)]
        content = message["content"]
        if message["role"] not in ("user", "assistant") and isinstance(content, str):
            missing += [] if has(content) else [f"what role {message['role']!r} says"]
    if missing:
        raise DataError(
            f"{row.place}: the chat template of the base model leaves out {missing[0]}; take a "
            "base model whose template has a place for it, or rows without it"
        )


def _name(tool: Any) -> str:
    function = tool.get("function", tool) if isinstance(tool, dict) else {}
    return str(function.get("name", "")) if isinstance(function, dict) else ""
