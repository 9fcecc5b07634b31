"""`Unit`: a piece of a network that is built from stored tensors and may be shared by releases."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serving.engines.torch_engine.linear import Linear

Built = Linear | Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stored tensor that a unit is built from."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Two units with the same form and equal digests of their parts are equal. Releases in memory
    share such units."""

    kind: str
    parts: tuple[Part, ...]
    build: Callable[[list[Tensor]], Built]
    """Builds the unit. The argument has the prepared values of all parts in order, on the final
    device. The unit may keep their memory."""
    prepare: Callable[[int, Tensor], Tensor] = lambda _, values: values
    """Converts the values of the part with this number to the form in which the unit holds them."""
    extract_part: Callable[[Built, int], Tensor] | None = None
    """The opposite of `build`: the prepared values of one part, taken from a unit of the same form.
    None for units of one part."""

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
