"""Low-rank training (LoRA). The weight of a layer stays frozen. The product of two small matrices,
`second @ first`, is added to it. After the training, the product is merged into the weight, so a
release is an ordinary complete model.

Only `second` is trained. `first` is computed before the training. Its rows are directions in which
the layer's inputs vary much for the rows to learn, but little for the base model's own answers to
everyday prompts (`anchors.py`). So the trained change has a strong effect on the rows to learn, and
little effect on other texts. With SmolLM2-135M-Instruct, the trained model kept far more of the
base model's own answers than with a random `first`. (docs/measured/training.md compares this way
with ordinary LoRA.)

LoRA: https://arxiv.org/abs/2106.09685
A first matrix that is not trained: https://arxiv.org/abs/2308.03303
Directions taken from the inputs: https://arxiv.org/abs/2410.07170
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.retrain.layout import layout_of
from pipeline.retrain.loss import predict
from pipeline.retrain.packing import pack
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.tokens import TokenSequence
from pipeline.retrain.trunk import decoder_layers, num_frozen

SAMPLE_TOKENS = 2_048
"""The directions are computed from about this many tokens of the rows to learn, and as many of the
base model's own answers."""
BLOCK_TOKENS = 512
"""How many of these tokens are computed at once, if the model can compute several sequences in one
row without mixing them (`layout.py`)."""
RIDGE = 0.01
"""The variance of a layer's inputs for the base model's answers is measured in each direction. This
share of the mean variance is then added in each direction. The sample of answers is small, so other
answers may use a direction that no sampled answer uses. Without the addition, its variance would
count as 0."""


class LowRank(nn.Module):
    """A frozen linear layer plus the change `second @ first`. `second` is (out, r) and is trained.
    `first` is (r, in) and is fixed."""

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
        # The weight may be stored in 16 bits. Add in float32, so that it is rounded only once.
        weight = self.layer.weight
        weight.copy_(weight.float() + self.second @ self.first)
        return self.layer


@contextmanager
def low_rank(model: PreTrainedModel, plan: TrainingPlan, rank: int) -> Iterator[None]:
    """Inside, the layers that `chosen_layers` returns have matrices of `rank`, and nothing else in
    `model` can be trained. At the end, the matrices are merged into the weights of the layers. With
    rank 0, `model` is not changed, and all its weights are trained.

    If the training fails, the matrices stay in `model`, because nobody uses it any more."""
    if rank == 0:
        yield
        return
    layers = chosen_layers(model)
    rows = _inputs(model, [plan.sequences[i] for i in (*plan.learned, *plan.unlearned)], layers)
    anchors = _inputs(model, [anchor.sequence for anchor in plan.anchors], layers)
    model.requires_grad_(False)
    for name, layer in layers.items():
        first = _directions(rows.pop(name).float(), anchors.pop(name).float(), rank)
        model.set_submodule(name, LowRank(layer, first))
    yield
    for name in layers:
        wrapped = model.get_submodule(name)
        assert isinstance(wrapped, LowRank)
        model.set_submodule(name, wrapped.merge())
    model.requires_grad_(True)


def chosen_layers(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """The linear layers, by name, that get matrices: in most models the last layer of each MLP.
    They are found by their shape: the input is wider than the hidden states, and the output is as
    wide as the hidden states. If a model has no such layer, all linear layers except the output
    layer are chosen. The lower half of the model is left out, because it stays frozen
    (`num_frozen`)."""
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
    """The matrix `first` of a layer, (r, in): the generalized principal directions of `rows`
    compared with `anchors`.

    `rows` (N, in) are the layer's inputs for the rows to learn, and `anchors` (M, in) are its
    inputs for the base model's answers. Each direction is scaled so that `rows` have unit variance
    along it. So all layers learn at the same pace, whatever the scale of their inputs.
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
    model: PreTrainedModel, sequences: Sequence[TokenSequence], layers: dict[str, nn.Linear]
) -> dict[str, Tensor]:
    """The inputs of each layer for the first of the `sequences`, by the name of the layer: (tokens,
    in). They are kept in bfloat16 to save memory, because the inputs of all layers together are as
    large as the model."""
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
    # Compute one block at a time. In a batch of several blocks, the shorter blocks would be padded,
    # and the inputs of the padding would be recorded too. If each sequence gets a row of its own, a
    # little padding is still recorded: 5 tokens beside 2,061 of rows with 20 to 200 tokens.
    lengths = [len(each.token_ids) for each in sample]
    is_padded = layout_of(model) == "padded"
    for block in pack(lengths, max([BLOCK_TOKENS * (not is_padded), *lengths])):
        predict(model, [[sample[index] for index in block]])
    for hook in hooks:
        hook.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}
