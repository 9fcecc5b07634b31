"""Reads from `config.json` the shape of a network like Llama, or finds that `llama.py` cannot
compute the network."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engine import StageError
from serving.engines.torch_engine import rope
from serving.weights import network
from serving.weights.release import read_json

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
