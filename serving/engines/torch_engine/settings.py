"""What the embedded engine is told: `[serving.torch]`, and what an engine of one's own may set."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TorchSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    device: str | None = None
    """As torch spells it; None takes CUDA where there is one."""
    num_threads: int | None = Field(default=None, ge=1, le=1024)
    """Threads of the step loop on the CPU; None for one per core."""
    max_batch: int = Field(default=16, ge=1)
    """Sequences of one release that generate at once; more of them wait."""
    max_context: int | None = Field(default=None, ge=1)
    """Tokens of a sequence at most, prompt included. None for what the release allows, less where
    `kv_cache_bytes` does not hold one such sequence."""
    kv_cache_bytes: int = Field(default=2 << 30, ge=1)
    """Keys and values of one release. On the CPU memory is taken as sequences first reach it."""


class TorchEngineSettings(TorchSettings):
    """Settings of one embedded engine; the same for every release that it holds."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """`auto` computes in the dtype of the release where the device is fast in it, else float32."""
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
