"""Settings of the torch engine: `[serving.torch]`, and more for programs that make an engine."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str | None = None
    """The device, in torch's notation. Unset: CUDA if there is a GPU, else the CPU."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """The number of CPU threads that compute. Unset: one per core."""
    max_batch: int = Field(default=64, ge=1)
    """The largest number of sequences of one release that run at once. More sequences wait, and so
    do sequences whose tokens do not fit into `kv_cache_bytes`."""
    max_context: int | None = Field(default=None, ge=1)
    """The largest number of tokens in a sequence, prompt included. Unset: the limit of the release,
    or less if `kv_cache_bytes` is too small for one sequence of that length."""
    kv_cache_bytes: int = Field(default=2 << 30, ge=1)
    """The size of the KV cache of each release. On a CPU, memory is taken when it is first used,
    and the KV cache of a finished sequence stays until its memory is needed."""


class TorchEngineSettings(TorchSettings):
    """Settings of one engine. They are the same for every release that the engine holds."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """`serving.dtype` says what `auto` means."""
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
    stage_wait_seconds: float = 120.0
    """If two releases are in memory, a third one waits this long for one of them to be unloaded."""
