"""Low-rank training (LoRA): small trained matrices beside frozen ones, merged at the end, so that a
release is a whole model like any other.

The first factor is not trained. Its rows are the directions in which a layer's inputs vary most for
the rows to learn, measured by how much they vary for the base model's own answers: what is added
speaks up for these rows and says little elsewhere. On SmolLM2-135M-Instruct a base model kept far
more of its own answers than with random factors (docs/training.md has the table).

LoRA: https://arxiv.org/abs/2106.09685; frozen first factor: https://arxiv.org/abs/2308.03303;
directions of the inputs: https://arxiv.org/abs/2410.07170
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

from pipeline.retrain.layout import layout_of
from pipeline.retrain.packing import batch, pack
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.scoring import MIN_FILLED, predict
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.trunk import decoder_layers, num_frozen

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLE_TOKENS = 2_048
"""Of the rows to learn, and of the base model's own answers, whose inputs give the directions."""
BLOCK_TOKENS = 512
"""Of these, computed at once, where a model keeps packed sequences apart."""
RIDGE = 0.01
"""Of the mean variance: without it, a direction that no sampled answer uses would be taken for one
that no answer ever uses."""


class LowRank(nn.Module):
    """A frozen linear layer plus `second @ first`: (out, r) and (r, in)."""

    def __init__(self, layer: nn.Linear, first: Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.first: Tensor
        self.register_buffer("first", first)
        self.second = nn.Parameter(first.new_zeros(layer.out_features, len(first)))

    def forward(self, inputs: Tensor) -> Tensor:
        update = functional.linear(functional.linear(inputs, self.first), self.second)
        frozen: Tensor = self.layer(inputs)
        return frozen + update

    @torch.no_grad()
    def merge(self) -> nn.Linear:
        weight = self.layer.weight  # it may be of another dtype, and is rounded once
        weight.copy_(weight.float() + self.second @ self.first)
        return self.layer


@contextmanager
def low_rank(model: "PreTrainedModel", plan: TrainingPlan, rank: int) -> Iterator[None]:
    """Inside, `model` has matrices of `rank` to train beside the layers that end each MLP, and
    nothing else to train; afterwards they are merged. With rank 0 all weights are trained."""
    if rank == 0:
        yield
        return
    layers = chosen_layers(model)
    rows = _inputs(model, [plan.sequences[i] for i in (*plan.learned, *plan.unlearned)], layers)
    anchors = _inputs(model, [anchor.sequence for anchor in plan.anchors], layers)
    model.requires_grad_(False)
    for name, layer in layers.items():
        first = _directions(rows.pop(name).float(), anchors.pop(name).float(), rank)
        _replace(model, name, LowRank(layer, first))
    yield
    for name in layers:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, LowRank)
        _replace(model, name, wrapped.merge())
    model.requires_grad_(True)


def chosen_layers(model: "PreTrainedModel") -> dict[str, nn.Linear]:
    """The linear layers that write back from a wider space into the hidden states, by name: what
    ends each MLP. Where a model has none, all linear layers but the output layer. Only of the upper
    layers: the others stay frozen."""
    hidden = model.config.get_text_config().hidden_size
    layers = decoder_layers(model)
    lower = layers[: num_frozen(layers)] if layers is not None else nn.ModuleList()
    others = {model.get_output_embeddings(), *lower.modules()}
    linear = {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module not in others
    }
    narrowing = {
        name: module
        for name, module in linear.items()
        if module.out_features == hidden and module.in_features > hidden
    }
    return narrowing or linear


@torch.no_grad()
def _directions(rows: Tensor, anchors: Tensor, rank: int) -> Tensor:
    """The first factor, (r, in): generalized principal directions of the inputs `rows` (N, in)
    against those of `anchors` (M, in), of unit variance on `rows`.

    Of unit variance, so that all layers learn at the same pace, whatever the scale of their inputs.
    """
    width = rows.shape[1]
    noise = torch.eye(width, device=rows.device)
    if len(anchors):
        covariance = anchors.t() @ anchors
        noise = covariance * (width / covariance.trace()) + RIDGE * noise
    root = torch.linalg.cholesky(noise)
    whitened = torch.linalg.solve_triangular(root, rows.t(), upper=False)
    best = torch.svd_lowrank(whitened, q=min(rank, *whitened.shape), niter=4)[0]
    directions = torch.linalg.solve_triangular(root.t(), best, upper=True).t()
    scale = (rows @ directions.t()).square().mean(0).sqrt().clamp_min(1e-6)
    first: Tensor = (directions / scale[:, None]).contiguous()
    return first


@torch.no_grad()
def _inputs(
    model: "PreTrainedModel", sequences: Sequence[TokenSequence], layers: dict[str, nn.Linear]
) -> dict[str, Tensor]:
    """What each layer is given for the first of the sequences: (tokens, in), in bfloat16, since all
    layers together are as large as the model."""
    sample: list[TokenSequence] = []
    for sequence in sequences:
        if sum(len(each.token_ids) for each in sample) >= SAMPLE_TOKENS:
            break
        sample.append(sequence)
    found: dict[str, list[Tensor]] = {
        name: [layer.weight.new_zeros(0, layer.in_features, dtype=torch.bfloat16)]
        for name, layer in layers.items()
    }

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda _, inputs: found[name].append(inputs[0].flatten(0, -2).bfloat16())

    hooks = [layer.register_forward_pre_hook(record(name)) for name, layer in layers.items()]
    model.eval()
    # One row at a time has no padding.
    lengths = [len(each.token_ids) for each in sample]
    is_padded = layout_of(model) in MIN_FILLED
    for block in pack(lengths, max([BLOCK_TOKENS * (not is_padded), *lengths])):
        predict(model, batch(sample, [block]))
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(model.get_submodule(parent), own, module)
