"""Computes the output layer of a model: from hidden states to the logits that the model's own
forward pass computes.

The output layer of most models is one matrix. Some models also add a bias, scale the logits, or cap
them. No single key of the config says which of these a model does. So this module tries what the
config suggests, and compares the results with the model's own logits.
"""

from dataclasses import dataclass, replace
from itertools import product
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.layout import close_to, in_evaluation, last_hidden_states, random_document
from pipeline.retrain.packing import ROUNDED_TO

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of a config that hold a scale. Some models multiply the logits by it, and others divide."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of a config that hold a cap: no logit is larger than this number."""
_NUM_TOKENS = 16
_LARGEST_LOGIT = 100.0
"""For the comparison, the logits are scaled up to this size. On small logits, the effect of a cap
of 30 would be too small to see."""


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,)"""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) → (N, V), in float32. The caller may change the result in place."""
        rows = pad_rows(hidden.to(self.weight.dtype))
        return self.shaped(linear(rows, self.weight, self.bias)[: len(hidden)].float())

    def shaped(self, logits: Tensor) -> Tensor:
        """Apply the scale and the cap to `logits`, the products of the matrix and the hidden
        states."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def cast_for(self, hidden: Tensor) -> "Head":
        """This head in the dtype in which a matrix product with `hidden` is computed: the dtype of
        autocast if autocast is on, and otherwise the dtype of the weight."""
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)


def pad_rows(rows: Tensor) -> Tensor:
    """(N, …) → (M, …). Under autocast, rows of zeros are added until their number is a multiple of
    `ROUNDED_TO`. Otherwise M is N."""
    if not torch.is_autocast_enabled(rows.device.type):
        return rows
    return pad(rows, (0, 0, 0, -len(rows) % ROUNDED_TO))


_shapes: WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]] = WeakKeyDictionary()


def head_of(model: PreTrainedModel) -> Head:
    """The output layer of `model`, with its current weights.

    The first call for a model finds the scale and the cap, by comparison with the model's own
    logits on a few tokens. Raises BaseModelError if no known form of output layer gives these
    logits.
    """
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear):
        raise BaseModelError(
            f"a {type(model).__name__} cannot be trained here: its output layer is not one matrix "
            f"but {layer!r}; take another base model"
        )
    if model not in _shapes:
        with in_evaluation(model):
            _shapes[model] = _measure(model, layer)
    return Head(layer.weight, layer.bias, *_shapes[model])


def _measure(model: PreTrainedModel, layer: torch.nn.Linear) -> tuple[float, float | None]:
    """The scale and the cap with which the output layer gives the model's own logits."""
    token_ids = random_document(model, _NUM_TOKENS, seed=0)[None]
    products = Head(layer.weight, layer.bias).logits(last_hidden_states(model, token_ids)[0])
    factor = _LARGEST_LOGIT / float(products.abs().max())
    handle = layer.register_forward_hook(lambda _, __, products: products * factor)
    try:
        expected = model(input_ids=token_ids.to(model.device), use_cache=False).logits[0]
    finally:
        handle.remove()
    for scale, softcap in _candidates(model):
        head = Head(layer.weight, layer.bias, scale, softcap)
        if close_to(head.shaped(products * factor), expected):
            return scale, softcap
    raise BaseModelError(
        f"a {type(model).__name__} cannot be trained here: its logits are not those of its output "
        f"layer, with or without a scale ({', '.join(SCALES)}) or a cap ({', '.join(SOFTCAPS)}) "
        "from its config; take another base model"
    )


def _candidates(model: PreTrainedModel) -> list[tuple[float, float | None]]:
    """All pairs of scale and cap to try. Those that the config suggests come first."""
    numbers = [float(number) for key in SCALES if (number := getattr(model.config, key, None))]
    scales = [scale for number in numbers for scale in (number, 1 / number)]
    softcaps = [float(cap) for key in SOFTCAPS if (cap := getattr(model.config, key, None))]
    return list(product([*scales, 1.0], [*softcaps, None]))
