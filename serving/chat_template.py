"""Makes a prompt of a conversation, with the chat template of a model, in a sandbox. Training and
serving make their prompts here, so that they are the same.

The same conversation is written in many ways: by the API of OpenAI, by agent frameworks, by the
table formats of datasets. A row and a request that mean the same become equal in `normalise`, so
the model is asked what it was trained on. What depends on the chat template follows in `render`.

The template gets the filters, functions and blocks that `transformers` gives to templates
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import ctypes
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from threading import Thread, local
from typing import Any, NoReturn, Self, TypeVar

import jinja2
from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment
from pydantic_core import from_json

from serving.errors import ReleaseError

T = TypeVar("T")

Message = Mapping[str, Any]
"""`role`, `content`, and those of the other `FIELDS` that have a value. The content is a text, a
list of at least two parts of the form `{"type": "text", "text": …}`, or None: no text beside calls.
"""
FIELDS = (
    *("role", "content", "name", "tool_calls", "tool_call_id"),
    *("reasoning_content", "reasoning", "thinking", "tool_responses"),
)
"""The fields of a message that chat templates read. Others, such as `id` and `timestamp`, are left
out."""
_TEXT_PARTS = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a content part → its field with the text. vLLM accepts these types as text too."""

_TOOL_FIELDS = ("name", "description", "parameters")

PROMPT_DATE = "prompt_date"
"""The field of tokenizer_config.json that holds the day for `strftime_now`. A training writes it: a
model that has learned its answers after one date may not give them after another."""
MAX_RENDER_SECONDS = 10.0
"""The largest time of one rendering."""


_GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
"""The block `{% generation %}…{% endgeneration %}`, which marks the text of the assistant. Here it
is just the text inside: what follows a prompt is the answer to it."""


class ConversationError(ValueError):
    """No model could be shown this conversation: the reason, with the number of the message."""


@dataclass(frozen=True, kw_only=True)
class Conversation:
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    """Each of the form `{"type": "function", "function": {"name": …, …}}`."""


def normalise(
    messages: object, tools: object = None, *, must_be_readable: bool = True
) -> Conversation:
    """The conversation in its one form. Raises ConversationError. Without `must_be_readable`,
    arguments of calls that are no JSON object count as none.

    - Arrow fills in null for each key that another row has: such keys are left out, at any depth.
      But a null in arguments that are JSON text is kept, because somebody has written it there.
    - An empty list is no list.
    - The arguments of a call are the JSON text of an object, also if they are an object. A
      `function_call` is one of the `tool_calls`, and the role `function` is `tool`.
    - Text parts are parts of the type `text`, and one part alone is a text.

    The one form of a conversation in its one form is this form.
    """
    return Conversation(
        messages=tuple(
            _message(number, each, must_be_readable)
            for number, each in enumerate(_objects(messages, "messages"), 1)
        ),
        tools=tuple(_tool(tool) for tool in _objects(tools, "tools")),
    )


def parts_of(content: str | list[dict[str, str]] | None) -> list[dict[str, str]]:
    """The content of a message as a list of parts."""
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def text_of(content: str | list[dict[str, str]] | None) -> str:
    """The content of a message as one text."""
    return "\n".join(part["text"] for part in parts_of(content))


class ChatTemplateError(Exception):
    """The template refuses a conversation. A client or the author of a row gets the reason."""


class TooSlow(ChatTemplateError):
    """The rendering takes too long."""


class ChatTemplate:
    """The compiled chat template of a model."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        prompt_date: str | None = None,
    ) -> None:
        """`special_tokens` maps the names that templates use, such as `bos_token`, to the texts of
        these tokens. `prompt_date` is the day that `strftime_now` shows, such as `2026-01-31`; None
        means now.

        Raises ReleaseError if the template has a syntax error, or takes too long for one short
        message.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        try:
            day = None if prompt_date is None else datetime.fromisoformat(prompt_date)
            environment.globals["strftime_now"] = lambda format: (day or datetime.now()).strftime(
                format
            )
            source = _GENERATION.sub(_as_condition, source)
            self._template = environment.from_string(source)
            self.variables = meta.find_undeclared_variables(environment.parse(source))
            """The names of all variables that the template reads, such as `messages`, `tools`."""
            self._takes_parts = _takes_parts(self._template, special_tokens)
            """Whether the template expects a content as a list of parts, each
            `{"type": "text", "text": …}`. If not, it expects a text."""
        except (TemplateError, SyntaxError, RecursionError, ValueError) as error:
            raise ReleaseError(f"chat_template: {error}") from None
        except TooSlow as error:
            raise ReleaseError(f"chat_template: {error}, already for one short message") from None
        self._takes_none = re.search(r"content\W{0,3} is (not )?none", source) is not None
        """Whether the template asks if a content is none. If not, it expects an empty text."""
        # vLLM looks for the same texts.
        self._knows_developers = "'developer'" in source or '"developer"' in source
        """Whether the template handles the role `developer`. If not, it leaves such messages out,
        or shows the model a role that the model does not know."""
        used = [token for name, token in special_tokens.items() if name in source]
        self.texts = "".join([source, *used])
        """The source of the template, and the special tokens whose names it contains. Only tokens
        that occur in this text can get into a prompt through the template itself."""
        self._special_tokens = dict(special_tokens)

    # `self` and `conversation` are positional-only, because `kwargs` may contain any name.
    def render(
        self,
        conversation: Conversation,
        /,
        *,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        """The prompt for this conversation. `kwargs` are more variables for the template, such as
        the `chat_template_kwargs` of a request.

        With `add_generation_prompt`, the prompt ends with the beginning of a new message of the
        assistant. Raises ChatTemplateError if the template refuses the conversation or takes too
        long.
        """
        given = {
            **self._special_tokens,
            **kwargs,
            "add_generation_prompt": add_generation_prompt,
            "messages": self._shown(conversation.messages),
            "tools": conversation.tools or None,
        }
        try:
            return in_time(lambda: self._template.render(given))
        except TooSlow:
            raise
        # A filter or a method that gets a value of an unexpected type may raise anything, such as
        # AttributeError. vLLM too makes a refusal of each exception.
        except Exception as error:
            raise ChatTemplateError(" ".join(str(error).split()) or repr(error)) from None

    def _shown(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the form that the template expects."""
        if not self._knows_developers:
            messages = _developers_as_system(messages)
        shown = []
        for message in messages:
            content = message["content"]
            if not (content is None and self._takes_none):
                # As in vLLM, the content of a message of the role `tool` is always a text.
                in_parts = self._takes_parts and message["role"] != "tool"
                content = parts_of(content) if in_parts else text_of(content)
            shown.append({**message, "content": content})
            if calls := message.get("tool_calls"):
                shown[-1]["tool_calls"] = [
                    {**call, "function": {**function, "arguments": _Arguments.of(function)}}
                    for call in calls
                    for function in (call["function"],)
                ]
        return shown


_to_json = partial(json.dumps, ensure_ascii=False)
_watched = local()


def in_time(function: Callable[[], T], num_renderings: int = 1) -> T:
    """The result of `function`, which renders a template, or TooSlow if it takes too long. jinja2
    keeps a template away from the objects of this process, but lets it loop forever.

    It takes a thread. So call it once around many renderings: it then watches all of them together.
    """
    if getattr(_watched, "is_on", False):
        return function()
    result: Future[T] = Future()
    seconds = MAX_RENDER_SECONDS * num_renderings

    def work() -> None:
        _watched.is_on = True
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    thread = Thread(target=work, daemon=True)
    thread.start()
    try:
        return result.result(seconds)
    except TimeoutError:
        # This raises an exception in the thread, so that a loop ends.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(thread.ident or 0), ctypes.py_object(TooSlow)
        )
        raise TooSlow(f"the chat template takes more than {seconds:g} seconds") from None


class _Arguments(dict[str, Any]):
    """The arguments of a call. Most templates expect an object, and some its JSON text: if they
    write it as a text or add it to one, they get this text."""

    @classmethod
    def of(cls, function: Mapping[str, Any]) -> Self:
        return cls(json.loads(function["arguments"]))

    def __str__(self) -> str:
        return _to_json(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


def _takes_parts(template: jinja2.Template, special_tokens: Mapping[str, str]) -> bool:
    """Whether the template shows the text of a part, and not the part."""
    content = [{"type": "text", "text": "Hello"}]
    given = {**special_tokens, "messages": [{"role": "user", "content": content}]}
    try:
        shown = in_time(lambda: template.render(given))
    except TooSlow:
        raise
    except Exception:
        return False
    return "Hello" in shown and re.search("""['"]text['"]""", shown) is None


def _developers_as_system(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages for a chat template that does not know the role `developer`: as in vLLM, such a
    message gets the role `system`. Many templates accept a message of the system only at the
    beginning, so several of them, or one at another place, become one message at the beginning."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    roles = ("system", "developer")
    texts = [text_of(message["content"]) for message in messages if message["role"] in roles]
    return [
        {"role": "system", "content": "\n\n".join(filter(None, texts))},
        *(message for message in messages if message["role"] not in roles),
    ]


def _as_condition(block: re.Match[str]) -> str:
    return f"{block[1]}{'endif' if block[2] else 'if true'}{block[3]}"


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _objects(value: object, name: str) -> Sequence[dict[str, Any]]:
    found = _without_nulls(_decoded(value, name) if isinstance(value, str) else value)
    if found in (None, ""):
        return ()
    if not isinstance(found, list | tuple) or not all(isinstance(each, dict) for each in found):
        raise ConversationError(f"`{name}` is not a list of objects")
    return found


def _without_nulls(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return [_without_nulls(each) for each in value]
    if isinstance(value, Mapping):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return value


def _decoded(text: str, name: str) -> Any:
    try:
        return from_json(text, allow_inf_nan=False) if text.strip() else None
    except ValueError as error:
        raise ConversationError(f"`{name}` is text that is not JSON ({error})") from None


def _message(number: int, message: dict[str, Any], must_be_readable: bool) -> Message:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise ConversationError(f"message {number} has no `role`")
    try:
        given = [*_objects(message.get("tool_calls"), "tool_calls")]
        if legacy := message.get("function_call"):
            given.append({"function": legacy})
        calls = [_call(each, must_be_readable) for each in given]
        content = _content(message.get("content"))
    except ConversationError as error:
        raise ConversationError(f"message {number} ({role}): {error}") from None
    return {
        **{key: message[key] for key in FIELDS if message.get(key)},
        "role": "tool" if role == "function" else role,
        "content": content or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }


def _content(content: object) -> str | list[dict[str, str]]:
    if isinstance(content, list):
        texts = [_text(part) for part in content]
        return [{"type": "text", "text": text} for text in texts] if texts[1:] else "".join(texts)
    if content is not None and not isinstance(content, str):
        raise ConversationError(f"`content` is {content!r}, not text")
    return content or ""


def _text(part: object) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else part
    text = part.get(_TEXT_PARTS.get(str(kind), "")) if isinstance(part, dict) else None
    if not isinstance(text, str):
        raise ConversationError(f"content part {kind!r}: only text is supported")
    return text


def _call(call: dict[str, Any], must_be_readable: bool) -> dict[str, Any]:
    function = call.get("function", call)
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str) or not name:
        raise ConversationError(f"the call {call!r} names no function")
    arguments = function.get("arguments")
    try:
        if isinstance(arguments, str):
            arguments = _decoded(arguments, "arguments")
        if not isinstance(arguments, dict | None):
            raise ConversationError(f"the arguments of {name!r} are {arguments!r}, not an object")
    except ConversationError:
        if must_be_readable:
            raise
        arguments = {}
    named = {"id": call["id"]} if call.get("id") else {}
    text = json.dumps(arguments or {}, ensure_ascii=False)
    return {**named, "type": "function", "function": {"name": name, "arguments": text}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function", {key: tool[key] for key in tool if key != "type"})
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConversationError(f"the tool {tool!r} names no function")
    # Templates write tools as JSON, so the order of the fields is a part of the prompt.
    first = {key: function[key] for key in _TOOL_FIELDS if key in function}
    return {"type": "function", "function": first | function}
