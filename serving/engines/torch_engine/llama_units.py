"""Lists the fused units of a Llama or a similar network, and the stored tensors of each unit."""

from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from serving.engines.torch_engine import rope
from serving.engines.torch_engine.architecture import LlamaShape
from serving.engines.torch_engine.linear import Linear
from serving.engines.torch_engine.units import Built, Part, Unit

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def units(shape: LlamaShape) -> dict[str, Unit]:
    """All units of the network. The keys are their names in `LlamaRunner`."""
    found = {
        "embedding": _plain(EMBEDDING, (shape.vocab_size, shape.hidden_size)),
        "norm": _norm("model.norm.weight", shape.hidden_size),
        "head": _linear(
            {EMBEDDING if shape.is_tied else HEAD: shape.vocab_size}, shape.hidden_size, False
        ),
    }
    for layer in range(shape.num_layers):
        found.update(_layer_units(shape, layer))
    return found


def ties(shape: LlamaShape) -> dict[str, str]:
    """Alias → name of the tensor that the network uses instead."""
    return {HEAD: EMBEDDING} if shape.is_tied else {}


def ignored(names: Iterable[str]) -> set[str]:
    """The stored tensors that are not weights: the RoPE frequencies in older checkpoints."""
    return {name for name in names if name.endswith("rotary_emb.inv_freq")}


def _layer_units(shape: LlamaShape, layer: int) -> dict[str, Unit]:
    at = f"model.layers.{layer}."
    hidden, inner, heads = shape.hidden_size, shape.intermediate_size, shape.num_heads
    queries, keys = heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    attention, mlp = at + "self_attn.", at + "mlp."
    found = {
        "input_norm": _norm(at + "input_layernorm.weight", hidden),
        "mlp_norm": _norm(at + "post_attention_layernorm.weight", hidden),
        "qkv": _linear(
            {
                attention + "q_proj.weight": queries,
                attention + "k_proj.weight": keys,
                attention + "v_proj.weight": keys,
            },
            hidden,
            shape.qkv_bias,
            rotated=(heads, shape.num_kv_heads, shape.head_dim),
        ),
        "output": _linear({attention + "o_proj.weight": hidden}, queries, shape.output_bias),
        "gate_up": _linear(
            {mlp + "gate_proj.weight": inner, mlp + "up_proj.weight": inner}, hidden, shape.mlp_bias
        ),
        "down": _linear({mlp + "down_proj.weight": hidden}, inner, shape.mlp_bias),
    }
    if shape.has_head_norms:
        found["query_norm"] = _head_norm(attention + "q_norm.weight", shape.head_dim)
        found["key_norm"] = _head_norm(attention + "k_norm.weight", shape.head_dim)
    return {f"{layer}.{name}": unit for name, unit in found.items()}


def _plain(name: str, shape: tuple[int, ...]) -> Unit:
    return Unit(kind="plain", parts=(Part(name=name, shape=shape),), build=lambda parts: parts[0])


def _norm(name: str, size: int) -> Unit:
    """A norm's weight, in float32 whatever the dtype of the network is."""
    return Unit(
        kind="norm",
        parts=(Part(name=name, shape=(size,)),),
        build=lambda parts: parts[0],
        prepare=lambda _, values: values.float(),
    )


def _head_norm(name: str, head_dim: int) -> Unit:
    order = rope.interleave(1, head_dim)
    return Unit(
        kind="head norm",
        parts=(Part(name=name, shape=(head_dim,)),),
        build=lambda parts: parts[0],
        prepare=lambda _, values: values[order.to(values.device)].float(),
    )


def _linear(
    rows_by_weight: dict[str, int],
    columns: int,
    has_bias: bool,
    *,
    rotated: tuple[int, int, int] | None = None,
) -> Unit:
    """A unit with several weights stacked into one matrix.

    `rotated` is (query heads, KV heads, head dim). With it, the rows of the first two weights
    (queries and keys) get the order of `rope.interleave`.
    """
    weights = [Part(name=name, shape=(rows, columns)) for name, rows in rows_by_weight.items()]
    biases = [
        Part(name=name.removesuffix("weight") + "bias", shape=(rows,))
        for name, rows in rows_by_weight.items()
        if has_bias
    ]

    sizes = list(rows_by_weight.values())
    starts = list(accumulate(sizes, initial=0))

    def prepare(number: int, values: Tensor) -> Tensor:
        block = number % len(sizes)
        if rotated is None or block > 1:
            return values
        heads, kv_heads, head_dim = rotated
        order = rope.interleave((heads, kv_heads)[block], head_dim)
        return values[order.to(values.device)]

    def build(parts: list[Tensor]) -> Linear:
        weight = _stack(parts[: len(weights)])
        return Linear(weight, _stack(parts[len(weights) :]) if biases else None)

    def extract_part(built: Built, number: int) -> Tensor:
        assert isinstance(built, Linear)
        block = number % len(sizes)
        whole = built.plain_weight() if number < len(weights) else built.bias
        assert whole is not None
        return whole[starts[block] : starts[block + 1]]

    kind = "linear" if rotated is None else f"linear rotated {rotated}"
    return Unit(
        kind=kind,
        parts=(*weights, *biases),
        build=build,
        prepare=prepare,
        extract_part=extract_part,
    )


def _stack(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
