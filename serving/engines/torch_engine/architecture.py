"""Reads from `config.json` the shape of a network like Llama, or finds that `llama.py` cannot
compute the network. Lists the fused units of such a network, and their stored tensors."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving.engine import StageError
from serving.engines.torch_engine import rope
from serving.engines.torch_engine.linear import Linear
from serving.engines.torch_engine.loading import Part, Unit
from serving.weights import network
from serving.weights.release import Release, read_json

_LLAMA_LIKE = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
_REQUIRED = (
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "rms_norm_eps",
    "vocab_size",
)
_OTHER_DEFAULTS = {
    "MistralForCausalLM": ("num_key_value_heads", "sliding_window"),
    "Qwen2ForCausalLM": ("num_key_value_heads",),
    "Qwen3ForCausalLM": ("num_key_value_heads", "head_dim"),
}
"""Settings for which this architecture has another default than Llama."""

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True, slots=True)
class LlamaShape:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    norm_eps: float
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    has_head_norms: bool
    """Whether queries and keys are normalised in each head (Qwen3)."""
    is_tied: bool
    rope: dict[str, Any]

    @property
    def ties(self) -> dict[str, str]:
        """Alias → name of the tensor that the network uses instead."""
        return {_HEAD: _EMBEDDING} if self.is_tied else {}


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`.

    If a network like Llama leaves out a setting that `llama_shape` needs, `transformers` adds its
    defaults. Raises ReleaseError if `config.json` cannot be read, and StageError if it describes
    quantised weights.
    """
    path = folder / network.CONFIG_FILE
    config = read_json(path)
    if config.get("quantization_config") is not None:
        raise StageError(f"{path}: quantised weights are not supported; publish plain ones")
    kind = str(next(iter(config.get("architectures") or ()), None))
    needed = (*_REQUIRED, *_OTHER_DEFAULTS.get(kind, ()))
    if kind in _LLAMA_LIKE and any(key not in config for key in needed):
        # Only for configurations that need it, because `transformers` takes seconds to import.
        config = dict(network.load_config(folder).to_dict())
    return config


def llama_shape(config: dict[str, Any]) -> LlamaShape | None:
    """The shape of the network; None if `llama.py` computes something else than this network. Then
    `transformers` runs it."""
    architectures = config.get("architectures") or [None]
    name = architectures[0]
    if name not in _LLAMA_LIKE or any(key not in config for key in _REQUIRED):
        return None
    parameters = rope.rope_parameters(config)
    uses_window = config.get("use_sliding_window", name == "MistralForCausalLM")
    window = config.get("sliding_window") if uses_window else None
    if (
        config.get("hidden_act", "silu") != "silu"
        or parameters["rope_type"] not in rope.SUPPORTED
        or parameters.get("partial_rotary_factor", 1.0) != 1.0
        or (window is not None and window < config["max_position_embeddings"])
        or any(kind != "full_attention" for kind in config.get("layer_types") or ())
    ):
        return None
    num_heads = config["num_attention_heads"]
    has_bias = bool(config.get("attention_bias", False))
    return LlamaShape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        qkv_bias=has_bias or name == "Qwen2ForCausalLM",
        output_bias=has_bias and name != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        has_head_norms=name == "Qwen3ForCausalLM",
        is_tied=bool(config.get("tie_word_embeddings", False)),
        rope=parameters,
    )


def llama_units(shape: LlamaShape) -> dict[str, Unit]:
    """All units of the network. The keys are their names in `LlamaRunner`."""
    vocabulary = shape.vocab_size, shape.hidden_size
    found = {
        "embedding": _tensor(Part(name=_EMBEDDING, shape=vocabulary)),
        "norm": _norm("model.norm.weight", shape.hidden_size),
        "head": _linear(Part(name=_EMBEDDING if shape.is_tied else _HEAD, shape=vocabulary)),
    }
    for layer in range(shape.num_layers):
        found.update(_layer_units(shape, layer))
    return found


def stored_units(release: Release) -> dict[str, Unit]:
    """A unit for each stored tensor."""
    return {
        name: _tensor(Part(name=name, shape=entry.shape)) for name, entry in release.tensors.items()
    }


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
