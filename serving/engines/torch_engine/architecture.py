"""Reads from `config.json` the shape of a network like Llama, or finds that `llama.py` cannot
compute the network. Lists the units of such a network, and computes its rotary position embeddings
(RoPE, arXiv:2104.09864)."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from serving.engine import StageError
from serving.engines.torch_engine.loading import Part, Unit
from serving.weights.network import CONFIG_FILE
from serving.weights.release import Release, read_json

_SETTINGS = {
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_hidden_layers",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
}
_LLAMA_LIKE = {
    "LlamaForCausalLM": _SETTINGS,
    "MistralForCausalLM": _SETTINGS | {"sliding_window"},
    "Qwen2ForCausalLM": _SETTINGS,
    "Qwen3ForCausalLM": _SETTINGS | {"head_dim"},
}
"""Architecture → the settings that `config.json` must have. The others have the same default in
each of these architectures."""
_ROPE_TYPES = ("default", "linear", "llama3")


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
    rope: dict[str, Any]


def read_config(folder: Path) -> dict[str, Any]:
    """The content of `config.json`. Raises ReleaseError if it cannot be read, and StageError if it
    describes quantised weights."""
    path = folder / CONFIG_FILE
    config = read_json(path)
    if config.get("quantization_config") is not None:
        raise StageError(f"{path}: quantised weights are not supported; publish plain ones")
    return config


def llama_shape(config: dict[str, Any]) -> LlamaShape | None:
    """The shape of the network; None if `llama.py` computes something else than this network, or if
    the config leaves out a setting. Then `transformers` runs it."""
    name = next(iter(config.get("architectures") or ()), None)
    if name not in _LLAMA_LIKE or not config.keys() >= _LLAMA_LIKE[name]:
        return None
    rope = rope_parameters(config)
    uses_window = config.get("use_sliding_window", name == "MistralForCausalLM")
    window = config.get("sliding_window") if uses_window else None
    if (
        config.get("hidden_act", "silu") != "silu"
        or rope["rope_type"] not in _ROPE_TYPES
        or rope.get("partial_rotary_factor", 1.0) != 1.0
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
        num_kv_heads=config["num_key_value_heads"] or num_heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // num_heads,
        context=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        qkv_bias=has_bias or name == "Qwen2ForCausalLM",
        output_bias=has_bias and name != "Qwen2ForCausalLM",
        mlp_bias=bool(config.get("mlp_bias", False)),
        has_head_norms=name == "Qwen3ForCausalLM",
        rope=rope,
    )


def llama_units(shape: LlamaShape) -> dict[str, Unit]:
    """All units of the network. The keys are their names in `LlamaRunner`."""
    vocabulary = Part(shape=(shape.vocab_size, shape.hidden_size))
    found = {
        "embedding": Unit(parts={"model.embed_tokens.weight": vocabulary}),
        "norm": _norm("model.norm", shape.hidden_size),
        "head": _linear({"lm_head": vocabulary}),
    }
    for layer in range(shape.num_layers):
        found.update(_layer_units(shape, layer))
    return found


def stored_units(release: Release) -> dict[str, Unit]:
    """A unit for each stored tensor."""
    return {
        name: Unit(parts={name: Part(shape=entry.shape)}) for name, entry in release.tensors.items()
    }


def _layer_units(shape: LlamaShape, layer: int) -> dict[str, Unit]:
    at = f"model.layers.{layer}."
    hidden, inner, head_dim = shape.hidden_size, shape.intermediate_size, shape.head_dim
    queries, keys = shape.num_heads * head_dim, shape.num_kv_heads * head_dim
    to_inner = Part(shape=(inner, hidden))
    found = {
        "input_norm": _norm(f"{at}input_layernorm", hidden),
        "mlp_norm": _norm(f"{at}post_attention_layernorm", hidden),
        "qkv": _linear(
            {
                f"{at}self_attn.q_proj": Part(shape=(queries, hidden), rotated_head_dim=head_dim),
                f"{at}self_attn.k_proj": Part(shape=(keys, hidden), rotated_head_dim=head_dim),
                f"{at}self_attn.v_proj": Part(shape=(keys, hidden)),
            },
            has_bias=shape.qkv_bias,
        ),
        "output": _linear(
            {f"{at}self_attn.o_proj": Part(shape=(hidden, queries))}, has_bias=shape.output_bias
        ),
        "gate_up": _linear(
            {f"{at}mlp.gate_proj": to_inner, f"{at}mlp.up_proj": to_inner}, has_bias=shape.mlp_bias
        ),
        "down": _linear(
            {f"{at}mlp.down_proj": Part(shape=(hidden, inner))}, has_bias=shape.mlp_bias
        ),
    }
    if shape.has_head_norms:
        for name, norm in (("query_norm", "q_norm"), ("key_norm", "k_norm")):
            found[name] = _norm(f"{at}self_attn.{norm}", head_dim, rotated_head_dim=head_dim)
    return {f"{layer}.{name}": unit for name, unit in found.items()}


def _norm(module: str, size: int, *, rotated_head_dim: int | None = None) -> Unit:
    """A norm's weight, in float32 whatever the dtype of the network is."""
    part = Part(shape=(size,), rotated_head_dim=rotated_head_dim, is_float32=True)
    return Unit(parts={f"{module}.weight": part})


def _linear(weights: dict[str, Part], *, has_bias: bool = False) -> Unit:
    """A unit with the weights of several modules. A bias has the form of its weight."""
    parts = {f"{module}.weight": part for module, part in weights.items()}
    if has_bias:
        for module, part in weights.items():
            parts[f"{module}.bias"] = replace(part, shape=part.shape[:1])
    return Unit(parts=parts, is_linear=True)


def rope_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """The RoPE settings of a configuration. `config.json` has an older and a newer spelling; the
    result has the newer one."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    parameters.setdefault("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    parameters.setdefault("original_max_position_embeddings", config["max_position_embeddings"])
    return parameters


def rotations(parameters: dict[str, Any], head_dim: int, positions: int) -> Tensor:
    """complex64 [positions, head_dim / 2]: the factor for each pair of a head at each position."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    if parameters["rope_type"] == "linear":  # position interpolation, arXiv:2306.15595
        frequencies /= parameters["factor"]
    elif parameters["rope_type"] == "llama3":
        frequencies = _scaled_as_in_llama3(frequencies, parameters)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def _scaled_as_in_llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and blends those between."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = frequencies * (parameters["original_max_position_embeddings"] / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = kept * frequencies + (1.0 - kept) * frequencies / parameters["factor"]
    return blended
