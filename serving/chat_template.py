"""Makes a prompt of chat messages, with the chat template of the release, in a sandbox.

The template gets the filters, functions and blocks that `transformers` gives to templates
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, meta
from jinja2.ext import Extension
from jinja2.nodes import (
    Call,
    CallBlock,
    Const,
    Filter,
    For,
    Getattr,
    Getitem,
    Macro,
    Name,
    Node,
    Slice,
    Template,
    Test,
)
from jinja2.parser import Parser

from serving.errors import ReleaseError
from serving.template_sandbox import BoundedSandbox, TooCostly, render_bounded

logger = logging.getLogger(__name__)

_END_OF_FINAL_MESSAGE = "END_OF_FINAL_MESSAGE "
"""A marker for the end of the last message in a prompt. It ends with a space: if this space is
missing in the prompt, the template strips spaces."""


class ChatTemplateError(Exception):
    """The template refuses the messages of a request. The client gets the reason."""


class ChatTemplate:
    """The compiled chat template of a release."""

    def __init__(
        self, source: str, special_tokens: Mapping[str, str], with_tools: str | None = None
    ) -> None:
        """`special_tokens` maps the names that templates use, such as `bos_token`, to the texts of
        these tokens. `with_tools` is the template for requests with tools; None if `source` is the
        template for all requests.

        Raises ReleaseError if one of the two templates has a syntax error.
        """
        environment = BoundedSandbox(
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
            """The names of all variables that the template reads, such as `messages`, `tools`."""
            self._takes_parts = {
                False: _loops_over_parts(environment.parse(source)),
                True: _loops_over_parts(environment.parse(with_tools or source)),
            }
        except (TemplateError, SyntaxError, RecursionError) as error:
            raise ReleaseError(f"chat_template: {error}") from None
        self._knows_developers = {
            False: _names_developers(source),
            True: _names_developers(with_tools or source),
        }
        used = [token for name, token in special_tokens.items() if name in self.source]
        self.texts = "".join([self.source, *used])
        """The source of the template, and the special tokens whose names it contains. Only tokens
        that occur in this text can get into a prompt through the template itself."""
        self._special_tokens = dict(special_tokens)

    def takes_parts(self, *, with_tools: bool) -> bool:
        """Whether the template expects the content of a message as a list of parts, each of the
        form `{"type": "text", "text": …}`. If not, it expects a text."""
        return self._takes_parts[with_tools]

    def knows_developers(self, *, with_tools: bool) -> bool:
        """Whether the template handles messages with the role `developer`. If not, it leaves them
        out, or shows the model a role that the model does not know."""
        return self._knows_developers[with_tools]

    # `self` and `messages` are positional-only, because `kwargs` may contain any name.
    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt for these messages. `kwargs` are more variables for the template, such as the
        `chat_template_kwargs` of a request.

        With `add_generation_prompt`, the prompt ends with the beginning of a new message of the
        assistant. With `continue_final_message`, it ends with the text of the last message.

        Raises ChatTemplateError if both are set, or if the template refuses the messages. Raises
        TooCostly if the rendering takes too long or makes too long texts.
        """
        if continue_final_message:
            if add_generation_prompt:
                raise ChatTemplateError(
                    "continue_final_message and add_generation_prompt exclude each other"
                )
            messages = _mark_end(messages)
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
            prompt = render_bounded(template, variables)
        except TooCostly:
            raise
        # A filter or a method that gets a value of an unexpected type may raise anything, such as
        # AttributeError. vLLM too makes a refusal of each exception.
        except Exception as error:
            raise ChatTemplateError(str(error)) from None
        return _cut_at_mark(prompt) if continue_final_message else prompt

    def check(self) -> None:
        """Render a plain message. Raises ReleaseError if this takes too long or makes too long
        texts. If the template refuses the message, only logs a warning, because the template may
        accept other messages."""
        try:
            self.render([{"role": "user", "content": "Hello"}])
        except TooCostly as error:
            raise ReleaseError(f"chat_template: {error}, already for one short message") from None
        except ChatTemplateError as error:
            logger.warning("the chat template refuses a plain message of a user: %s", error)


class _GenerationBlock(Extension):
    """The block `{% generation %}…{% endgeneration %}`, which marks the text of the assistant. Only
    training needs the mark. A prompt contains just the text inside the block."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it like this

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


def _loops_over_parts(template: Template) -> bool:
    """Whether a loop of the template runs over the content of a message, or over a parameter of a
    macro that gets such a content. vLLM looks for the same loops to find out whether a template
    expects the content as a list of parts."""
    if any(_is_content(_inside_filters(loop.iter)) for loop in template.find_all(For)):
        return True
    with_content = _parameters_with_content(template)
    for macro in template.find_all(Macro):
        for loop in macro.find_all(For):
            match _inside_filters(loop.iter):
                case Name(name=name) if (macro.name, name) in with_content:
                    return True
    return False


def _parameters_with_content(template: Template) -> set[tuple[str, str]]:
    """The parameters of macros that get the content of a message from some call: the names of the
    macro and of the parameter."""
    parameters = {
        macro.name: [each.name for each in macro.args] for macro in template.find_all(Macro)
    }
    found = set()
    for call in template.find_all(Call):
        match call.node:
            case Name(name=macro) if macro in parameters:
                given = [
                    *zip(parameters[macro], call.args, strict=False),
                    *((each.key, each.value) for each in call.kwargs),
                ]
                found |= {
                    (macro, name) for name, value in given if _is_content(_inside_filters(value))
                }
    return found


def _inside_filters(node: Node | None) -> Node | None:
    """`node` without the filters, tests and slices around it."""
    while isinstance(node, Filter | Test) or (
        isinstance(node, Getitem) and isinstance(node.arg, Slice)
    ):
        node = node.node
    return node


def _is_content(node: Node | None) -> bool:
    match node:
        case Name(name="content") | Getattr(attr="content") | Getitem(arg=Const(value="content")):
            return True
    return False


def _names_developers(source: str) -> bool:
    """vLLM looks for the same texts."""
    return "'developer'" in source or '"developer"' in source


def _mark_end(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    content = messages[-1].get("content") if messages else None
    if isinstance(content, list) and content:
        last = content[-1]
        content = [*content[:-1], {**last, "text": last["text"] + _END_OF_FINAL_MESSAGE}]
    elif isinstance(content, str):
        content += _END_OF_FINAL_MESSAGE
    else:
        raise ChatTemplateError("the final message has no text that could be continued")
    return [*messages[:-1], {**messages[-1], "content": content}]


def _cut_at_mark(prompt: str) -> str:
    start, mark, rest = prompt.rpartition(_END_OF_FINAL_MESSAGE.strip())
    if not mark:
        raise ChatTemplateError("the template does not show the end of the final message")
    # If the template strips messages, it has removed the space after the marker. Then also remove
    # the spaces before the marker, as the template would do if there were no marker.
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
