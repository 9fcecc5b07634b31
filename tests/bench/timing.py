"""Rounds that take turns, and what is made of their seconds."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")


def in_turns(
    num_rounds: int,
    works: Mapping[str, Callable[[], T]],
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[T]]:
    """A, B, A, B, …: what slows the machine down for a while slows all of them down. `before` is
    called before each turn."""
    found: dict[str, list[T]] = {name: [] for name in works}
    for _ in range(num_rounds):
        for name, work in works.items():
            before()
            found[name].append(work())
    return found


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else float("nan")
