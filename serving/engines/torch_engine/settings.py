"""What the embedded engine is told: `[serving.torch]`, and what an engine of one's own may set."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str | None = None
    """The device, as torch names it. Unset: CUDA if there is a GPU, else the CPU."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads that compute. Unset: one per core."""
    max_batch: int = Field(default=64, ge=1)
    """How many sequences of one release are generated at once. More than these wait, and those for
    whose tokens `kv_cache_bytes` has no room."""
    max_context: int | None = Field(default=None, ge=1)
    """The most tokens of a sequence, prompt included. Unset: what the release allows, or less if
    `kv_cache_bytes` cannot hold one such sequence."""
    kv_cache_bytes: int = Field(default=2 << 30, ge=1)
    """Memory for keys and values, per release. On the CPU it is taken when it is first used, and
    finished sequences keep theirs until it is needed."""


class TorchEngineSettings(TorchSettings):
    """Settings of one embedded engine; the same for every release that it holds."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """`serving.engines.dtype` says what `auto` means."""
    max_batch_tokens: int = 512
    """Prompt tokens read in one step at most."""
    step_seconds: float = 0.05
    """How long steps that read a prompt may hold back the streams that run beside them, those of
    both releases together. Held as far as 16 prompt tokens a step, the least that is read."""
    memory_reserve_bytes: int = 256 << 20
    """Left free by staging."""
    neighbours: Path | None = None
    """A file on which others hold a lock while they compute: steps leave them a core then."""
    stage_wait_seconds: float = 120.0
    """How long a third release waits for one of two to end."""
