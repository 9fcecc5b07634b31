"""`Linear`: one weight matrix in the layout that this device multiplies fastest."""

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows that a packed layout is chosen for: a full decoding batch. It serves one row as well.
_PACKED_FOR_ROWS = 16


class Linear:
    """`x @ weight.T + bias`.

    On the CPU the weight is packed once into oneDNN's blocked layout, and the plain one is let go:
    a decoding step, which is bound by reading weights, takes half the time or less that
    `F.linear` takes on the plain layout.
    """

    __slots__ = ("__weakref__", "_bias", "_is_packed", "_weight", "nbytes")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [out, in] and `bias` [out], both on the device and in the dtype to use."""
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._bias = bias
        self._is_packed = weight.device.type == "cpu" and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        if self._is_packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] to [rows, out]."""
        if self._is_packed:
            y: Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return y
        return F.linear(x, self._weight, self._bias)
