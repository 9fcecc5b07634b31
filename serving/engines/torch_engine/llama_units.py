"""Lists the fused units of a Llama or a similar network, and the stored tensors of each unit."""

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from serving.engines.torch_engine.architecture import LlamaShape
from serving.engines.torch_engine.linear import Linear
from serving.engines.torch_engine.loading import Part, Unit

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


def units(shape: LlamaShape) -> dict[str, Unit]:
    """All units of the network. The keys are their names in `LlamaRunner`."""
    vocabulary = shape.vocab_size, shape.hidden_size
    found = {
        "embedding": _tensor(Part(name=EMBEDDING, shape=vocabulary)),
        "norm": _norm("model.norm.weight", shape.hidden_size),
        "head": _linear(Part(name=EMBEDDING if shape.is_tied else HEAD, shape=vocabulary)),
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
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim

    def weight(name: str, rows: int, columns: int, rotated_head_dim: int | None = None) -> Part:
        return Part(
            name=f"{at}{name}.weight", shape=(rows, columns), rotated_head_dim=rotated_head_dim
        )

    found = {
        "input_norm": _norm(at + "input_layernorm.weight", hidden),
        "mlp_norm": _norm(at + "post_attention_layernorm.weight", hidden),
        "qkv": _linear(
            weight("self_attn.q_proj", queries, hidden, head_dim),
            weight("self_attn.k_proj", keys, hidden, head_dim),
            weight("self_attn.v_proj", keys, hidden),
            has_bias=shape.qkv_bias,
        ),
        "output": _linear(weight("self_attn.o_proj", hidden, queries), has_bias=shape.output_bias),
        "gate_up": _linear(
            weight("mlp.gate_proj", inner, hidden),
            weight("mlp.up_proj", inner, hidden),
            has_bias=shape.mlp_bias,
        ),
        "down": _linear(weight("mlp.down_proj", hidden, inner), has_bias=shape.mlp_bias),
    }
    if shape.has_head_norms:
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            found[name] = _norm(f"{at}self_attn.{norm}.weight", head_dim, rotated_head_dim=head_dim)
    return {f"{layer}.{name}": unit for name, unit in found.items()}


def _norm(name: str, size: int, *, rotated_head_dim: int | None = None) -> Unit:
    """A norm's weight, in float32 whatever the dtype of the network is."""
    return _tensor(
        Part(name=name, shape=(size,), rotated_head_dim=rotated_head_dim, is_float32=True)
    )


def _tensor(part: Part) -> Unit:
    return Unit(kind="plain", parts=(part,), build=lambda parts: parts[0])


def _linear(*weights: Part, has_bias: bool = False) -> Unit:
    """A unit with several weights stacked into one matrix. A bias has the form of its weight."""
    biases = [
        replace(weight, name=weight.name.removesuffix("weight") + "bias", shape=weight.shape[:1])
        for weight in weights
        if has_bias
    ]
    return Unit(kind="linear", parts=(*weights, *biases), build=_build_linear)


def _build_linear(parts: list[Tensor]) -> Linear:
    weights = [part for part in parts if part.dim() == 2]
    biases = [part for part in parts if part.dim() == 1]
    return Linear(_stack(weights), _stack(biases) if biases else None)


def _stack(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)
