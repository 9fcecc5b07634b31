"""Low-rank training (LoRA). The weight of a linear layer stays frozen. The product of two small
matrices, `second @ first`, is added to it, and only these two are trained. After the training, the
product is merged into the weight, so a release is an ordinary complete model.

All linear layers except the output layer get such matrices. With matrices in the upper half of the
layers only, a model learns wordings: it gives a question in other words the answer of another row
(docs/measured/training.md). Noise on the embeddings of the tokens helps against this, too.

The inputs of a layer have a few directions in which all texts are large. A gradient points mostly
there, so plain LoRA changes what the model says to everything, and learns a single row slowly. So
`first` sees its inputs without their usual directions: scaled down there until they are as small as
in the average other direction. In short trainings, it learns and understands twice as
many answers (docs/measured/training.md).

LoRA: https://arxiv.org/abs/2106.09685
In all layers, with about ten times the learning rate of a training of all weights:
https://thinkingmachines.ai/blog/lora/
Noise on the embeddings: https://arxiv.org/abs/2310.05914
Gradients that do not depend on the scale of the inputs (K-FAC): https://arxiv.org/abs/1503.05671
Changes that keep out of the directions of other texts: https://arxiv.org/abs/2410.02355
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.loss import predict
from pipeline.retrain.tokens import TokenSequence

SCALE = 32.0
"""The product is multiplied by SCALE / rank, so that the best learning rate hardly depends on the
rank."""


NOISE = 0.35
"""To each number of an embedding, a training step adds a random one of at most this many standard
deviations of the embeddings. But not to those of anchors: with noise, the base model itself would
give other answers than its own, and the model would learn to remove the noise."""


DIRECTIONS = 64
"""In so many directions are the inputs of a layer scaled down, but in at most half of all."""
MAX_GAIN = 10.0
"""The other directions are scaled up at most so many times."""
USUAL_TOKENS = 2_048
"""The directions are measured on about so many tokens of the base model's answers, and in a delta
on as many of known rows."""


class LowRank(nn.Module):
    """A frozen linear layer plus `second @ first`. `second` is (out, r), and 0 at first. `first` is
    (r, in), and sees the inputs times `gain * (1 - usual @ usual.T)`. `usual` is (in, k)."""

    usual: Tensor

    def __init__(self, layer: nn.Linear, rank: int, usual: Tensor, gain: float) -> None:
        super().__init__()
        self.layer = layer
        self.scale = gain * SCALE / rank
        self.register_buffer("usual", usual)
        most = 1 / math.sqrt(layer.in_features)
        zeros = partial(torch.zeros, device=layer.weight.device, dtype=torch.float32)
        self.first = nn.Parameter(zeros(rank, layer.in_features).uniform_(-most, most))
        self.second = nn.Parameter(zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        # Not in bfloat16: this is a small difference of large numbers.
        with torch.autocast(inputs.device.type, enabled=False):
            first = self._first()
        update = functional.linear(functional.linear(inputs, first), self.second)
        frozen: Tensor = self.layer(inputs)
        return frozen + self.scale * update

    def _first(self) -> Tensor:
        return self.first - (self.first @ self.usual) @ self.usual.T

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        # The weight may be stored in 16 bits. Add in float32, so that it is rounded only once.
        weight = self.layer.weight
        weight.copy_(weight.float() + self.scale * (self.second @ self._first()))
        return self.layer


@contextmanager
def low_rank(
    model: PreTrainedModel, rank: int, seed: int, kept: Sequence[TokenSequence] = ()
) -> Iterator[None]:
    """kept: texts on which the model should stay as it is.

    Inside, the linear layers have matrices of `rank`, nothing else in `model` can be trained,
    and training steps add noise to the embeddings. At the end, the matrices are merged into the
    weights of the layers. Raises BaseModelError if there is no linear layer.

    If the training fails, the matrices stay in `model`, because nobody uses it any more."""
    output = model.get_output_embeddings()
    layers = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not output
    }
    if not layers:
        raise BaseModelError(
            f"a {type(model).__name__} has no linear layers to which low-rank matrices can be "
            "added; set `train.lora_rank = 0` to train all weights"
        )
    torch.manual_seed(seed)
    model.requires_grad_(False)
    usual = _usual_inputs(model, layers, kept)
    for name, layer in layers.items():
        model.set_submodule(name, LowRank(layer, rank, *usual[name]))
    noise = model.get_input_embeddings().register_forward_hook(_add_noise)
    yield
    noise.remove()
    for name in layers:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, LowRank)
        model.set_submodule(name, wrapped.merge())
    model.requires_grad_(True)


@torch.no_grad()
def _usual_inputs(
    model: PreTrainedModel, layers: Mapping[str, nn.Linear], kept: Sequence[TokenSequence]
) -> dict[str, tuple[Tensor, float]]:
    """`usual` and `gain` of each layer, measured on `kept`. The gain makes the inputs as large as
    they were. A layer that got no such inputs gets no directions, and the gain 1."""
    found: dict[str, tuple[Tensor, float]] = {}

    def note(name: str, layer: nn.Module, inputs: tuple[Tensor]) -> None:
        flat = inputs[0].flatten(0, -2).float()
        num_directions = min(DIRECTIONS, *(size // 2 for size in flat.shape))
        energy = float(flat.square().sum()) / flat.shape[1]
        # If broken weights give inputs that are not finite, the training reports it.
        if not num_directions or not 0 < energy < math.inf:
            return
        _, lengths, directions = torch.svd_lowrank(flat, q=num_directions)
        found_energy = float(lengths.square().sum())
        rest = (flat.shape[1] * energy - found_energy) / (flat.shape[1] - num_directions)
        rest = max(rest, energy / MAX_GAIN**2)
        shares = (math.sqrt(rest) / lengths).clamp(max=1)
        found[name] = directions * (1 - shares).sqrt(), math.sqrt(energy / rest)

    hooks = [layer.register_forward_pre_hook(partial(note, name)) for name, layer in layers.items()]
    if kept:
        predict(model, [[each] for each in kept])
    for hook in hooks:
        hook.remove()
    nothing = next(model.parameters()).new_zeros(0, dtype=torch.float32)
    return {
        name: found.get(name, (nothing.expand(layer.in_features, 0), 1.0))
        for name, layer in layers.items()
    }


def _add_noise(embeddings: nn.Module, _: object, output: Tensor) -> Tensor:
    if not embeddings.training:
        return output
    noisy = embeddings.noisy
    assert isinstance(noisy, Tensor)
    noise = NOISE * output.std() * torch.empty_like(output).uniform_(-1, 1)
    return output + noise * noisy[..., None]
