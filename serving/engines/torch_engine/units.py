"""`Unit`: a piece of a network that is built from stored tensors and may be shared by releases."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from serving.engines.torch_engine import rope
from serving.engines.torch_engine.linear import Linear

Built = Linear | Tensor
PartForm = tuple[tuple[int, ...], int | None, bool]
Form = tuple[str, tuple[PartForm, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """A stored tensor that a unit is built from, and the form in which the unit holds it."""

    name: str
    shape: tuple[int, ...]
    rotated_head_dim: int | None = None
    """If this is set, the rows of each head of this size get the order of `rope.interleave`."""
    is_float32: bool = False
    """Whether the values are held in float32, whatever the dtype of the network is."""

    @property
    def form(self) -> PartForm:
        return self.shape, self.rotated_head_dim, self.is_float32

    def prepare(self, values: Tensor) -> Tensor:
        """Converts the stored values to the form in which the unit holds them."""
        if self.rotated_head_dim is not None:
            order = rope.interleave(len(values) // self.rotated_head_dim, self.rotated_head_dim)
            values = values[order.to(values.device)]
        return values.float() if self.is_float32 else values


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """Two units with the same form and equal digests of their parts are equal. Releases in memory
    share such units."""

    kind: str
    """A name for what `build` does."""
    parts: tuple[Part, ...]
    build: Callable[[list[Tensor]], Built]
    """Builds the unit. The argument has the prepared values of all parts in order, on the final
    device. The unit may keep their memory."""

    @property
    def form(self) -> Form:
        return self.kind, tuple(part.form for part in self.parts)

    @property
    def numel(self) -> int:
        return sum(math.prod(part.shape) for part in self.parts)

    def extract_part(self, built: Linear, number: int) -> Tensor:
        """The prepared values of one part, taken from a `Linear` of the same form: some rows of the
        weight, or of the bias if the part has one dimension."""
        shapes = [part.shape for part in self.parts]
        rows = [shape[0] for shape in shapes[:number] if len(shape) == len(shapes[number])]
        whole = built.bias if len(shapes[number]) == 1 else built.plain_weight()
        assert whole is not None
        return whole[sum(rows) : sum(rows) + shapes[number][0]]
