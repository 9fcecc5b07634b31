"""The output layer: hidden states → the logits that the model's own forward pass computes.

Most models multiply with one matrix. Some add a bias, scale the logits or cap them. Which of these
a model does is not in any one setting, so what its config suggests is compared with its own logits.
"""

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import linear

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.layout import close_to, in_evaluation, last_hidden_states, random_document

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SCALES = ("logit_scale", "logits_scaling", "lm_head_multiplier")
"""Keys of a config with a number that some models multiply the logits by and others divide by."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Keys of a config with the number that no logit exceeds."""
_NUM_TOKENS = 16
_LARGEST_LOGIT = 100.0
"""The comparison makes the logits this large: a cap of 30 changes small ones too little to see."""


@dataclass(frozen=True, slots=True)
class Head:
    weight: Tensor
    """(V, H)"""
    bias: Tensor | None = None
    """(V,)"""
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, hidden: Tensor) -> Tensor:
        """(N, H) → (N, V), float32, which nobody else holds: a caller may change them in place."""
        return self.shaped(linear(hidden.to(self.weight.dtype), self.weight, self.bias).float())

    def shaped(self, logits: Tensor) -> Tensor:
        """What the model makes of its products of matrix and hidden state."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return logits

    def cast_for(self, hidden: Tensor) -> "Head":
        """The same in the dtype that a matrix product of `hidden` computes in: that of autocast,
        where it is on, else that of the weight."""
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return self
        dtype = torch.get_autocast_dtype(device)
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)


_shapes: "WeakKeyDictionary[PreTrainedModel, tuple[float, float | None]]" = WeakKeyDictionary()


def head_of(model: "PreTrainedModel") -> Head:
    """The output layer of `model`, with its weights as they are now.

    The first call compares it with the model's own logits on a few tokens. Raises BaseModelError
    when none of the known forms gives these.
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


def _measure(model: "PreTrainedModel", layer: torch.nn.Linear) -> tuple[float, float | None]:
    """The scale and the cap with which the output layer gives the logits of the model's forward."""
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


def _candidates(model: "PreTrainedModel") -> list[tuple[float, float | None]]:
    """Scale and cap, what the config suggests first."""
    numbers = [float(number) for key in SCALES if (number := getattr(model.config, key, None))]
    scales = [scale for number in numbers for scale in (number, 1 / number)]
    softcaps = [float(cap) for key in SOFTCAPS if (cap := getattr(model.config, key, None))]
    return list(product([*scales, 1.0], [*softcaps, None]))
