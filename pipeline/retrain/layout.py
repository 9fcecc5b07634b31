"""Finds, for each model, a layout of documents (token sequences) in a batch in which no document
sees another one. The layout is found by measurement.

- `packed`: several documents stand one after another in a row, and the position ids of each start
  at 0 again. For most models with attention, transformers builds a mask from these ids that keeps
  the documents apart. For other models (Bloom, Falcon, OPT, Mamba and its hybrids), it builds no
  such mask, so a document would see the documents before it.
- `prefixed`: like `packed`, but a common beginning of all documents stands only once in a row. This
  needs a mask of our own. Models with a sliding window do not accept this mask. Models that do not
  use torch's attention do not accept it either.
- `padded`: one document per row, padded at its end. The padding does no harm, because a causal
  model never sees later tokens. A model that the padding disturbs all the same cannot be trained.
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.retrain.errors import BaseModelError
from pipeline.retrain.packing import Batch, Blocks, packed, prefixed, row_groups
from pipeline.retrain.tokens import TokenSequence

Layout = Literal["prefixed", "packed", "padded"]

_LEAK = 1e-5
"""The largest share of a hidden state that may change when another document changes. If a model
keeps documents apart, nothing should change. But in a mixture of experts, rounding may depend on
the other rows."""
_layouts: WeakKeyDictionary[PreTrainedModel, Layout] = WeakKeyDictionary()


def layout_of(model: PreTrainedModel) -> Layout:
    """The fastest layout in which `model` computes the same as for each document alone. Raises
    BaseModelError if there is none.

    The first call for a model tries the layouts with a few dozen tokens. Later calls return the
    same result.
    """
    if model not in _layouts:
        with in_evaluation(model):
            _layouts[model] = _measure(model)
    return _layouts[model]


def arranged(model: PreTrainedModel, blocks: Blocks, rounded_to: int = 1) -> list[Batch]:
    """The sequences of the blocks in the layout of `model`. The length of the rows is a multiple of
    `rounded_to`."""
    layout = layout_of(model)
    if layout == "padded":
        return row_groups(blocks, rounded_to)
    shared = prefixed(blocks, rounded_to) if layout == "prefixed" else None
    return [shared or packed(blocks, rounded_to)]


def last_hidden_states(
    model: PreTrainedModel,
    token_ids: Tensor,
    position_ids: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """(B, T) token ids → (B, T, H), the hidden states that the output layer gets. position_ids:
    None to count each row from 0. They are dropped if the model takes no position ids. mask: (B, 1,
    T, T), or None for a causal mask."""
    given = {}
    if position_ids is not None and _takes_position_ids(model):
        given["position_ids"] = position_ids.to(model.device)
    if mask is not None:
        given["attention_mask"] = mask.to(model.device)
    output = model.base_model(input_ids=token_ids.to(model.device), use_cache=False, **given)
    hidden: Tensor = output.last_hidden_state
    return hidden


@contextmanager
def in_evaluation(model: PreTrainedModel) -> Iterator[None]:
    """Inside, `model` computes without dropout and gradients, in the precision of its weights."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
            yield
    finally:
        model.train(was_training)


def random_document(model: PreTrainedModel, num_tokens: int, seed: int) -> Tensor:
    """(T,) random token ids, the same for the same seed. This does not change the random numbers
    that the training draws."""
    generator = torch.Generator().manual_seed(seed)
    num_ids = model.get_input_embeddings().weight.shape[0]
    return torch.randint(num_ids, (num_tokens,), generator=generator)


def close_to(found: Tensor, expected: Tensor) -> bool:
    """Whether the two tensors differ only by rounding. NaN counts as equal to NaN: with broken
    weights, the training itself fails later, with a better message."""
    tolerance = max(1e-4, 8 * torch.finfo(expected.dtype).eps)
    largest = float(expected.abs().nan_to_num().max())
    return torch.allclose(
        found.float(), expected.float(), rtol=0, atol=tolerance * largest, equal_nan=True
    )


def _measure(model: PreTrainedModel) -> Layout:
    first, other, second = documents = [
        TokenSequence(tuple(random_document(model, size, seed).tolist()), (True,) * size, 0)
        for seed, size in enumerate((11, 11, 17))
    ]
    alone = [last_hidden_states(model, packed([[each]]).token_ids)[0] for each in documents]
    if _takes_position_ids(model):
        # Two rows, because flash attention keeps documents apart only in a batch of one row.
        rows = [packed([[each, second]] * 2) for each in (first, other)]
        after_first, after_other = (
            last_hidden_states(model, each.token_ids, each.position_ids)[0, -17:] for each in rows
        )
        leak = (after_first - after_other).abs().max()
        if leak <= _LEAK * alone[2].abs().max() and close_to(after_first, alone[2]):
            return "prefixed" if _shares_prefixes(model) else "packed"
    beside = last_hidden_states(model, packed([[each] for each in documents]).token_ids)
    if all(close_to(row[: len(own)], own) for row, own in zip(beside, alone, strict=True)):
        return "padded"
    raise BaseModelError(
        f"a {type(model).__name__} cannot be trained here: padding at the end of a text changes "
        "what it computes; take another base model"
    )


def _shares_prefixes(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config()
    if getattr(config, "sliding_window", None) or config._attn_implementation != "sdpa":
        return False
    shared, *ends = (random_document(model, size, size).tolist() for size in (9, 5, 11))
    sequences = [
        TokenSequence((*shared, *end), (False,) * 10 + (True,) * (len(end) - 1), 0) for end in ends
    ]
    row = prefixed([sequences])
    assert row is not None
    hidden = last_hidden_states(model, row.token_ids, row.position_ids, row.mask)
    expected = last_hidden_states(model, packed([sequences[1:]]).token_ids)
    return close_to(hidden[0, -11:], expected[0, -11:])


def _takes_position_ids(model: PreTrainedModel) -> bool:
    return "position_ids" in inspect.signature(model.base_model.forward).parameters
