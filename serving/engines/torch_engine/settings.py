"""`TorchEngineSettings`: what the embedded engine is given. It reads no environment."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchEngineSettings:
    """Settings of one embedded engine; the same for every release that it holds."""

    dtype: Literal["float32", "bfloat16", "float16", "auto"] = "auto"
    """`auto` computes in the dtype of the release where the device is fast in it, else float32."""
    device: str | None = None
    """As torch spells it; None takes CUDA where there is one."""
    num_threads: int | None = None
    """Threads of the step loop on the CPU; None for one per core."""
    max_batch: int = 16
    """Sequences of one release that generate at once; more of them wait."""
    max_batch_tokens: int = 512
    """Prompt tokens read in one step at most."""
    step_seconds: float = 0.1
    """How long a step that reads a prompt may hold back the streams that run beside it. Held as
    far as 16 prompt tokens a step, the least that is read."""
    max_context: int | None = None
    """Tokens of a sequence, prompt included; None for what the release allows."""
    kv_cache_bytes: int = 2 << 30
    """Keys and values of one release. On the CPU memory is taken as sequences first reach it."""
    memory_reserve_bytes: int = 256 << 20
    """Left free by staging."""
    stage_wait_seconds: float = 120.0
    """How long a third release waits for one of two to end."""
