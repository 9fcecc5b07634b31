"""Turns chat messages into a prompt by a tokenizer's own template, in a sandbox.

The environment is the one that templates are written for
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.errors import ReleaseError

_END_OF_FINAL_MESSAGE = "END_OF_FINAL_MESSAGE "
"""Marks where the last message ends in a prompt. Templates may strip the space."""


class ChatTemplateError(Exception):
    """The template refuses these messages; the reason is for who sent them."""


class ChatTemplate:
    def __init__(
        self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None
    ) -> None:
        """`special_tokens` maps names such as `bos_token`, which templates use, to texts.
        `with_tools` is the template for requests with tools, where that is another one.

        Raises ReleaseError if one of the two is not a template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
            self._with_tools = environment.from_string(with_tools or source)
            self.source = source + (with_tools or "")
            self.variables = meta.find_undeclared_variables(environment.parse(self.source))
            """All that it reads, such as `messages` and `tools`."""
        except TemplateError as error:
            raise ReleaseError(f"chat_template: {error}") from None
        used = [token for name, token in special_tokens.items() if name in self.source]
        self.texts = "".join([self.source, *used])
        """All that it may put into a prompt of its own."""
        self._special_tokens = dict(special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt, up to where the assistant's turn begins. `kwargs` are further variables of
        the template (`chat_template_kwargs` of a request).

        With `continue_final_message` the prompt ends with the text of the last message. Raises
        ChatTemplateError.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError(
                    "continue_final_message and add_generation_prompt exclude each other"
                )
            messages = _with_end_marked(messages)
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            template = self._template if tools is None else self._with_tools
            prompt = template.render(variables)
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError(str(error)) from None
        return _up_to_the_mark(prompt) if continue_final_message else prompt


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}`, which marks what an assistant says. Training masks by
    it; a prompt only has the text inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _with_end_marked(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    content = messages[-1].get("content") if messages else None
    if not isinstance(content, str):
        raise ChatTemplateError("the final message has no text that could be continued")
    return [*messages[:-1], {**messages[-1], "content": content + _END_OF_FINAL_MESSAGE}]


def _up_to_the_mark(prompt: str) -> str:
    start, mark, rest = prompt.rpartition(_END_OF_FINAL_MESSAGE.strip())
    if not mark:
        raise ChatTemplateError("the template does not show the final message's end")
    # A template that strips messages leaves no space behind the mark, nor one in front of it.
    return start if rest.startswith(" ") else start.rstrip()


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
