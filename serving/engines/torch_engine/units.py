"""`Unit`: what a network is built of: stored tensors that are checked, fused and kept together."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serving.engines.torch_engine.linear import Linear

Built = Linear | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One stored tensor that a unit needs."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Parts with equal digests build equal units of one form: those two are what is shared."""

    kind: str
    parts: tuple[Part, ...]
    build: Callable[[list[Tensor]], Built]
    """Called with the parts' prepared values in order, in the dtype and on the device to use, as
    memory that the unit may keep."""
    prepare: Callable[[int, Tensor], Tensor] = lambda _, values: values
    """The values of the part with that number, as the unit holds them."""
    part: Callable[[Built, int], Tensor] | None = None
    """The way back: the prepared values of one part, out of a unit of the same form. None for units
    of one part."""

    @property
    def form(self) -> tuple[str, tuple[tuple[int, ...], ...]]:
        return self.kind, tuple(part.shape for part in self.parts)

    @property
    def numel(self) -> int:
        total = 0
        for part in self.parts:
            size = 1
            for length in part.shape:
                size *= length
            total += size
        return total
