"""`Linear`: a weight matrix in the layout with the fastest product.

Only this module calls private operators of torch. If a version of torch does not have them, or if
they take other arguments there, matrices keep the plain layout, which is slower.
"""

import functools
import logging

import torch
from torch import Tensor
from torch.nn import functional as F

_log = logging.getLogger(__name__)

# The number of rows for which oneDNN chooses the layout. The layout serves any other number too.
_PACKED_FOR_ROWS = 16


class Linear:
    """`x @ weight.T + bias`.

    The weight is packed once into oneDNN's blocked layout, and the plain weight is freed. A
    decoding step is limited by the time to read weights. With the packed layout it takes at most
    half the time that it takes with `F.linear` and the plain layout.
    """

    __slots__ = ("__weakref__", "_weight", "bias", "is_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` is [out, in], `bias` is [out]. Both must have the final dtype."""
        self.bias = bias
        self.is_packed = _can_pack(weight.dtype)
        if self.is_packed:
            weight = _pack(weight)
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """`x` is [rows, in]. Returns [rows, out]."""
        if self.is_packed:
            return _multiply_packed(x, self._weight, self.bias)
        return F.linear(x, self._weight, self.bias)

    def plain_weight(self) -> Tensor:
        """[out, in], with exactly the original values. A copy if the weight is packed."""
        return self._weight.to_dense(self._weight.dtype) if self.is_packed else self._weight


@functools.cache
def _can_pack(dtype: torch.dtype) -> bool:
    is_available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if dtype not in (torch.float32, torch.bfloat16) or not is_available:
        return False
    try:
        if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
            return False
        identity = torch.eye(_PACKED_FOR_ROWS, dtype=dtype)
        return torch.equal(_multiply_packed(identity, _pack(identity), None), identity)
    except (AttributeError, RuntimeError, TypeError) as error:
        _log.warning(
            "torch %s does not multiply packed %s matrices (%s); answers take longer",
            torch.__version__,
            dtype,
            error,
        )
        return False


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
    return packed


def _multiply_packed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return y
