"""Rotary position embeddings (RoPE): computes frequencies from a configuration, and the rotations
as complex numbers.

Su et al., arXiv:2104.09864. `linear` is position interpolation (arXiv:2306.15595). `llama3` is the
frequency-dependent scaling of Llama 3.1.
"""

import math
from typing import Any

import torch
from torch import Tensor

SUPPORTED = ("default", "linear", "llama3")


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
    frequencies = _frequencies(parameters, head_dim)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    return torch.polar(torch.ones_like(angles), angles)


def interleave(num_heads: int, head_dim: int) -> Tensor:
    """The order of rows that makes the two rows of each rotating pair adjacent, in each head.

    Checkpoints store the real half of a head before its imaginary half. Queries and keys are only
    multiplied with each other, so any order gives the same products if both have it.
    """
    rows = torch.arange(num_heads * head_dim).view(num_heads, 2, head_dim // 2)
    return rows.transpose(1, 2).reshape(-1)


def _frequencies(parameters: dict[str, Any], head_dim: int) -> Tensor:
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies: Tensor = 1.0 / (parameters["rope_theta"] ** exponents)
    if parameters["rope_type"] == "linear":
        return frequencies / float(parameters["factor"])
    if parameters["rope_type"] == "llama3":
        return _llama3(frequencies, parameters)
    return frequencies


def _llama3(frequencies: Tensor, parameters: dict[str, Any]) -> Tensor:
    """Divides low frequencies by `factor`, keeps high ones, and blends those between."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = frequencies * (parameters["original_max_position_embeddings"] / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    blended: Tensor = kept * frequencies + (1.0 - kept) * frequencies / parameters["factor"]
    return blended
