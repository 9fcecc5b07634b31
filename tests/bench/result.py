"""What a row's program says: figures beside their targets, and what bounds them.

A program is a module with a `Size` at full and at small size, and a function from a size to a
`Result`; `run_program` makes a command of the three.
"""

import argparse
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, JsonValue

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S", bound="DataclassInstance")


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class Figure(_Record):
    what: str
    value: float | None
    """None where nothing could be measured."""
    unit: str
    target: str | None = None
    """None for a figure that only stands beside others."""
    met: bool | None = None
    beside: str = ""
    """What a ratio was made of, and what else was measured in the same turns."""


class Result(_Record):
    figures: tuple[Figure, ...]
    bounded_by: str = ""
    """What keeps the figures from being better, as far as the run itself shows it."""
    detail: dict[str, JsonValue] = {}
    """Everything else that was measured: rounds, phases, counts."""


def reported(what: str, value: float, unit: str, *, beside: str = "") -> Figure:
    return Figure(what=what, value=_finite(value), unit=unit, beside=beside)


def at_least(what: str, value: float, target: float, unit: str, *, beside: str = "") -> Figure:
    met = value >= target  # False for NaN
    stated = f"at least {_with_unit(f'{target:.5g}', unit)}"
    return Figure(what=what, value=_finite(value), unit=unit, target=stated, met=met, beside=beside)


def at_most(what: str, value: float, target: float, unit: str) -> Figure:
    met = value <= target
    stated = f"at most {_with_unit(f'{target:.5g}', unit)}"
    return Figure(what=what, value=_finite(value), unit=unit, target=stated, met=met)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def run_program(measure: Callable[[S], Result], *, full: S, small: S) -> None:
    """The command line of a row: `--small`, `--json FILE`, and an option for each field of its
    size. Prints the figures."""
    parser = argparse.ArgumentParser(description=measure.__doc__)
    parser.add_argument("--small", action="store_true", help="sizes of the tests, not of a figure")
    parser.add_argument("--json", type=Path, help="write the result here, too")
    for field in fields(full):
        default = getattr(full, field.name)
        many = {"nargs": "+"} if isinstance(default, tuple) else {}
        kind: Any = type(default[0] if many else default)
        parser.add_argument(f"--{field.name.replace('_', '-')}", type=kind, **many)
    asked = vars(parser.parse_args())
    size = small if asked.pop("small") else full
    file: Path | None = asked.pop("json")
    given = {name: value for name, value in asked.items() if value is not None}
    given = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    result = measure(replace(size, **given))
    if file is not None:
        file.write_text(result.model_dump_json(indent=2))
    for figure in result.figures:
        print(f"{figure.what}: {shown(figure)}", flush=True)


def shown(figure: Figure) -> str:
    """The value, its target and whether it is met, in a few words."""
    if figure.target is None:
        return amount(figure)
    return f"{amount(figure)} ({figure.target}: {'met' if figure.met else 'MISSED'})"


def amount(figure: Figure) -> str:
    """The value with its unit."""
    if figure.value is None:
        return "not measured"
    if figure.value.is_integer():
        digits = 0
    else:
        digits = 0 if abs(figure.value) >= 100 else 1 if abs(figure.value) >= 10 else 3
    found = _with_unit(f"{figure.value:,.{digits}f}", figure.unit)
    return f"{found}: {figure.beside}" if figure.beside else found


def _with_unit(number: str, unit: str) -> str:
    return f"{number} {unit}".strip()
