"""Makes a prompt of a conversation, with the chat template of a model, in a sandbox. Training and
serving make their prompts here, so that they are the same.

The template gets the filters, functions and blocks that `transformers` gives to templates
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import ctypes
import json
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from functools import partial
from threading import Thread, local
from typing import Any, NoReturn, Self, TypeVar

import jinja2
from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.conversation import Conversation, Message, parts_of, text_of
from serving.errors import ReleaseError

T = TypeVar("T")

PROMPT_DATE = "prompt_date"
"""The field of tokenizer_config.json that holds the day for `strftime_now`. A training writes it: a
model that has learned its answers after one date may not give them after another."""
MAX_RENDER_SECONDS = 10.0
"""The largest time of one rendering."""


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
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        self.source = source
        try:
            day = None if prompt_date is None else datetime.fromisoformat(prompt_date)
            environment.globals["strftime_now"] = lambda format: (day or datetime.now()).strftime(
                format
            )
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
            "documents": conversation.documents or None,
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


class _GenerationBlock(Extension):
    """The block `{% generation %}…{% endgeneration %}`, which marks the text of the assistant. Here
    it is just the text inside: what follows a prompt is the answer to it."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)
