"""The sandbox in which chat templates run. It ends a rendering that takes too long or makes too
long texts.

A template comes with a checkpoint, which may be from anywhere. jinja2's own sandbox keeps the
template away from the objects of the server, but lets it loop forever.
"""

import time
from collections.abc import Iterable, Iterator
from typing import Any

from jinja2 import Environment, Template, nodes, pass_context
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RENDER_SECONDS = 5.0
"""The largest CPU time of one rendering. Time in which other threads run does not count, so a busy
machine refuses no more templates than an idle one."""
MAX_LENGTH = 2**24
"""The largest length of a prompt in characters. This is also the largest length of each text (in
characters), list (in items) and integer (in bits) that an operator, a call or a block of a template
makes. The result of a filter or of a method is measured only after it has been made."""

_BUDGET = "the budget of this rendering"
"""The name of the variable with the budget. A template cannot use this name, because of its spaces.
"""


class TooCostly(Exception):
    """The rendering takes too long, or makes a text that is too long."""


class _Budget:
    def __init__(self) -> None:
        self._end = time.thread_time() + MAX_RENDER_SECONDS

    def check_time(self) -> None:
        if time.thread_time() > self._end:
            raise TooCostly(
                f"the chat template takes more than {MAX_RENDER_SECONDS:g} seconds of CPU time"
            )

    def check_length(self, length: int) -> None:
        if length > MAX_LENGTH:
            raise TooCostly(
                "the chat template makes a text or list of more than "
                f"{MAX_LENGTH} characters or items"
            )


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose templates `render_bounded` can render."""

    intercepted_binops = frozenset(("+", "*", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters[_TIMED] = _timed
        self.filters[_MEASURED] = _measured

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        return super()._generate(_AddChecks(self).visit(source), *args, **options)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        # Macros and loops can call themselves, so also check the time at each call.
        context[_BUDGET].check_time()
        result = super().call(context, obj, *args, **kwargs)
        context[_BUDGET].check_length(_length(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        # Compute the length before the result is made, because the result could fill the memory.
        context[_BUDGET].check_length(_length_of_result(operator, left, right))
        return super().call_binop(context, operator, left, right)


def render_bounded(template: Template, variables: dict[str, Any]) -> str:
    """Render a template of a `BoundedSandbox`. Raises TooCostly, and all that jinja2 raises."""
    budget = _Budget()
    length = 0
    pieces = []
    try:
        for piece in template.generate({**variables, _BUDGET: budget}):
            pieces.append(piece)
            length += len(piece)
            budget.check_length(length)
    except MemoryError:  # from a filter, whose result is measured only after it was made
        raise TooCostly("the chat template makes a text that does not fit into memory") from None
    return "".join(pieces)


_TIMED = "check the time before each item"
_MEASURED = "check the length"


@pass_context
def _timed(context: Context, items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        context[_BUDGET].check_time()
        yield item


@pass_context
def _measured(context: Context, value: Any) -> Any:
    context[_BUDGET].check_length(_length(value))
    return value


class _AddChecks(NodeTransformer):
    """Applies the filter `_timed` to the items of each loop, and the filter `_measured` to joined
    texts (`a ~ b`) and to the texts of `{% set %}…{% endset %}`."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filtered(node.iter, _TIMED)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filtered(node, _MEASURED)

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.Node:
        self.generic_visit(node)
        node.filter = self._filtered(node.filter, _MEASURED)
        return node

    def _filtered(self, node: nodes.Node | None, name: str) -> nodes.Filter:
        return nodes.Filter(node, name, [], [], None, None, environment=self._environment)


def _length_of_result(operator: str, left: Any, right: Any) -> int:
    if operator == "+":
        return _length(left) + _length(right)
    if isinstance(left, int) and isinstance(right, int):
        bits = _length(left)
        return bits * abs(right) if operator == "**" else bits + _length(right)
    if isinstance(left, int):
        left, right = right, left
    return _length(left) * right if operator == "*" and isinstance(right, int) else 0


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length()
    return len(value) if isinstance(value, str | list | tuple) else 0
