"""Chooses the dtype in which a release is computed."""

from typing import Literal

import torch

from serving.weights.release import Release

Dtype = Literal["float32", "bfloat16", "float16"]


def choose_dtype(asked: Dtype | Literal["auto"], device_type: str, release: Release) -> Dtype:
    """The dtype in which a server computes `release`. `asked` is the dtype of the server's
    settings.

    `auto` means the dtype in which the release is stored, if two conditions hold: the device
    computes fast in this dtype, and the release's probe has a bound for this dtype (or the release
    has no probe). Otherwise `auto` means float32.
    """
    if asked != "auto":
        return asked
    stored = release.stored_dtype
    is_bounded = release.probe is None or stored in release.probe.bounds
    if stored == "bfloat16" and is_bounded and is_fast_in_bfloat16(device_type):
        return "bfloat16"
    if stored == "float16" and is_bounded and device_type == "cuda":
        return "float16"
    return "float32"


def is_fast_in_bfloat16(device_type: str) -> bool:
    """Whether matrix products on this machine's `cpu` or `cuda` device are faster in bfloat16 than
    in float32."""
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    # Look for the AVX-512 instructions for bfloat16. Processors with AMX have them too. The
    # function is private, so another version of torch may lack it.
    is_supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return device_type == "cpu" and is_supported is not None and bool(is_supported())
