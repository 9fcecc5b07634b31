"""Low-rank training (LoRA). The weight of a linear layer stays frozen. The product of two small
matrices, `second @ first`, is added to it, and only these two are trained. After the training, the
product is merged into the weight, so a release is an ordinary complete model.

All linear layers except the output layer get such matrices. With matrices in the upper half of the
layers only, a model learns wordings: it gives a question in other words the answer of another row
(docs/measured/training.md). Noise on the embeddings of the tokens helps against this, too.

LoRA: https://arxiv.org/abs/2106.09685
In all layers, with about ten times the learning rate of a training of all weights:
https://thinkingmachines.ai/blog/lora/
Noise on the embeddings: https://arxiv.org/abs/2310.05914
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.retrain.errors import BaseModelError

SCALE = 32.0
"""The product is multiplied by SCALE / rank, so that the best learning rate hardly depends on the
rank."""


NOISE = 0.35
"""To each number of an embedding, a training step adds a random one of at most this many standard
deviations of the embeddings. But not to those of anchors: with noise, the base model itself would
give other answers than its own, and the model would learn to remove the noise."""


class LowRank(nn.Module):
    """A frozen linear layer plus `second @ first`. `second` is (out, r), and 0 at first. `first` is
    (r, in)."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.scale = SCALE / rank
        most = 1 / math.sqrt(layer.in_features)
        zeros = partial(torch.zeros, device=layer.weight.device, dtype=torch.float32)
        self.first = nn.Parameter(zeros(rank, layer.in_features).uniform_(-most, most))
        self.second = nn.Parameter(zeros(layer.out_features, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        update = functional.linear(functional.linear(inputs, self.first), self.second)
        frozen: Tensor = self.layer(inputs)
        return frozen + self.scale * update

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        # The weight may be stored in 16 bits. Add in float32, so that it is rounded only once.
        weight = self.layer.weight
        weight.copy_(weight.float() + self.scale * (self.second @ self.first))
        return self.layer


@contextmanager
def low_rank(model: PreTrainedModel, rank: int, seed: int) -> Iterator[None]:
    """Inside, the linear layers have matrices of `rank`, nothing else in `model` can be trained,
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
    for name, layer in layers.items():
        model.set_submodule(name, LowRank(layer, rank))
    noise = model.get_input_embeddings().register_forward_hook(_add_noise)
    yield
    noise.remove()
    for name in layers:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, LowRank)
        model.set_submodule(name, wrapped.merge())
    model.requires_grad_(True)


def _add_noise(embeddings: nn.Module, _: object, output: Tensor) -> Tensor:
    if not embeddings.training:
        return output
    noisy = embeddings.noisy
    assert isinstance(noisy, Tensor)
    noise = NOISE * output.std() * torch.empty_like(output).uniform_(-1, 1)
    return output + noise * noisy[..., None]
