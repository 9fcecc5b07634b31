"""Turns chat messages into a prompt by a tokenizer's own template, in a sandbox.

The environment is the one that templates are written for
(https://huggingface.co/docs/transformers/chat_templating_writing).
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.errors import ReleaseError


class ChatTemplateError(Exception):
    """The template refuses these messages; the reason is for who sent them."""


class ChatTemplate:
    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ReleaseError(f"chat_template: {error}") from None
        used = [token for name, token in special_tokens.items() if name in source]
        self.texts = "".join([source, *used])
        """All that it may put into a prompt of its own."""
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt, up to where the assistant's turn begins. Raises ChatTemplateError."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            raise ChatTemplateError(str(error)) from None


def _refuse(reason: str) -> NoReturn:
    raise TemplateError(reason)


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
