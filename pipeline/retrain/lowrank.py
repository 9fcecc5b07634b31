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

The lower layers stay frozen, so `frozen_trunk` computes them once for a whole training. For a
token, the output of the lower layers depends only on this token and the tokens before it. So each
beginning of a sequence (its tokens up to some position) gets an id. A table holds, for each id, the
output of the lower layers for the last token of this beginning. Inside `frozen_trunk`, the
sequences of the plan hold these ids instead of token ids, and the table replaces the embedding. A
training step then computes only the upper layers. The code of the step needs no change.
"""

import contextlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from pipeline.retrain.layout import (
    arranged,
    block_length,
    close_to,
    in_evaluation,
    last_hidden_states,
    layout_of,
    pack,
    random_document,
)
from pipeline.retrain.loss import predict
from pipeline.retrain.plan import TrainingPlan
from pipeline.retrain.tokens import TokenSequence
from serving.weights.atomic_file import atomic_file

logger = logging.getLogger(__name__)

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
FROZEN_SHARE = 0.5
"""The share of the layers that is frozen, counted from the lowest layer."""
MAX_TABLE_BYTES = 512 * 2**20
"""The largest table. For hidden states of 576 numbers, it holds about 233,000 beginnings. If a
training has more, each step computes the lower layers again."""
BATCH_BLOCKS = 4
"""How many blocks of sequences are computed at once to fill the table."""


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
    `model` can be trained. At the end, the matrices are merged into the weights of the layers.

    If the training fails, the matrices stay in `model`, because nobody uses it any more."""
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


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | None:
    """The layers of `model` in order. None if it has no list, or several lists, of all its
    layers."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [
        module
        for module in model.base_model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    ]
    return lists[0] if len(lists) == 1 else None


def num_frozen(layers: nn.ModuleList) -> int:
    return int(FROZEN_SHARE * len(layers))


@contextmanager
def frozen_trunk(
    model: PreTrainedModel, plan: TrainingPlan, cache_dir: Path
) -> Iterator[TrainingPlan]:
    """Inside, `model` computes only its upper layers, and understands only the sequences of the
    plan that is yielded.

    The model and the plan stay as they are in three cases: the model cannot be cut into lower and
    upper layers, the table would be too large, or the plan learns plain text.

    cache_dir: keeps the table of the anchors for the next job. (Anchors are the base model's own
    answers to everyday prompts.)
    """
    ids: dict[tuple[int, int], int] = {}
    """(Id of a beginning without its last token, last token) → id of the beginning: 1, 2, 3, … in
    the order in which they are first seen. The id 0 is padding."""
    anchors = [_named(each.sequence, ids) for each in plan.anchors]
    num_anchored = len(ids) + 1
    sequences = [_named(each, ids) for each in plan.sequences]
    token_ids = torch.tensor([0, *(last for _, last in ids)])
    layers, embedding = decoder_layers(model), model.get_input_embeddings()
    width = model.config.get_text_config().hidden_size
    if (
        layers is None
        or layout_of(model) == "padded"
        or 4 * width * len(token_ids) > MAX_TABLE_BYTES
        or not plan.ends_when_right  # the loss of plain text is measured on other sequences
        or not _hand_on_hidden_states(model, layers)
    ):
        yield plan
        return
    example = plan.sequences[0]
    with in_evaluation(model):
        expected = last_hidden_states(model, torch.tensor([example.token_ids]))
        table = embedding.weight.new_zeros(len(token_ids), width)
        _fill_anchored(table[:num_anchored], model, layers, token_ids, anchors, cache_dir)
        _fill(table, model, layers, token_ids, sequences)
    lower = list(layers[: num_frozen(layers)])
    model.set_input_embeddings(nn.Embedding(len(table), width, _weight=table).requires_grad_(False))
    for number, layer in enumerate(lower):
        layers[number] = _Computed(layer)
    try:
        with in_evaluation(model):
            found = last_hidden_states(model, torch.tensor([sequences[0].token_ids]))
        is_exact = close_to(found, expected)
        if is_exact:
            yield replace(
                plan,
                sequences=sequences,
                anchors=[
                    replace(target, sequence=sequence)
                    for target, sequence in zip(plan.anchors, anchors, strict=True)
                ],
            )
    finally:
        model.set_input_embeddings(embedding)
        for number, layer in enumerate(lower):
            layers[number] = layer
    if not is_exact:
        logger.info(
            "each step computes the lower layers of a %s, because a table of them is not exact",
            type(model).__name__,
        )
        yield plan


def _hand_on_hidden_states(model: PreTrainedModel, layers: nn.ModuleList) -> bool:
    """Whether a layer returns only hidden states. Only such a layer can be left out."""
    kinds: list[type] = []
    handle = layers[0].register_forward_hook(lambda *call: kinds.append(type(call[-1])))
    with in_evaluation(model):
        last_hidden_states(model, random_document(model, 1, seed=0)[None])
    handle.remove()
    return kinds == [Tensor]


def _named(sequence: TokenSequence, ids: dict[tuple[int, int], int]) -> TokenSequence:
    """The sequence with ids of beginnings instead of token ids. Its `labels` hold the token ids."""
    found: list[int] = []
    last = 0
    for token_id in sequence.token_ids:
        last = ids.setdefault((last, token_id), len(ids) + 1)
        found.append(last)
    return replace(sequence, token_ids=tuple(found), labels=sequence.token_ids)


class _Computed(nn.Module):
    """Takes the place of a lower layer, and does nothing, because the table holds the result."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # Some models read this attribute of a layer to choose the layer's attention mask.
        self.attention_type = getattr(layer, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Reached(Exception):
    """The first upper layer was called. Raised to end the forward pass there. `hidden` is the
    output of the lower layers."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _fill_anchored(
    table: Tensor,
    model: PreTrainedModel,
    layers: nn.ModuleList,
    token_ids: Tensor,
    anchors: Sequence[TokenSequence],
    cache_dir: Path,
) -> None:
    """`_fill` for the anchors. What it writes is read from `cache_dir` if an earlier job has
    computed it with the same lower layers. Otherwise it is saved there."""
    asked = json.dumps([each.labels for each in anchors]).encode()
    path = cache_dir / f"trunk-{blake3(asked).hexdigest()[:16]}.safetensors"
    weights = blake3()
    for module in (model.get_input_embeddings(), *layers[: num_frozen(layers)]):
        for tensor in module.state_dict().values():
            weights.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy())
    described = {"weights": weights.hexdigest()}
    with contextlib.suppress(FileNotFoundError, SafetensorError), safe_open(path, "pt") as file:
        if file.metadata() == described:
            table.copy_(file.get_tensor("table"))
            return
    _fill(table, model, layers, token_ids, anchors)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as out:
        out.write(save({"table": table.cpu()}, described))


def _fill(
    table: Tensor,
    model: PreTrainedModel,
    layers: nn.ModuleList,
    token_ids: Tensor,
    sequences: Sequence[TokenSequence],
) -> None:
    """Compute the lower layers for `sequences`. For each beginning, write the output into the row
    of `table` that has the id of the beginning. token_ids: the last token of each beginning."""

    def reach(_: nn.Module, inputs: tuple[Tensor, ...], named: dict[str, Any]) -> None:
        raise _Reached(inputs[0] if inputs else named["hidden_states"])

    if not sequences:
        return
    blocks = pack([len(each.token_ids) for each in sequences], block_length(sequences))
    handle = layers[num_frozen(layers)].register_forward_pre_hook(reach, with_kwargs=True)
    try:
        for start in range(0, len(blocks), BATCH_BLOCKS):
            some = blocks[start : start + BATCH_BLOCKS]
            (group,) = arranged(model, [[sequences[index] for index in block] for block in some])
            try:
                last_hidden_states(
                    model, token_ids[group.token_ids], group.position_ids, group.mask
                )
            except _Reached as reached:
                table[group.token_ids.to(table.device)] = reached.hidden.to(table.dtype)
    finally:
        handle.remove()
