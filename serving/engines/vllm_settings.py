"""What the vLLM engine is told: `[serving.vllm]`, and the dtype that every engine is told."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one release is divided over."""
    max_context: int | None = Field(default=None, ge=1)
    """Tokens of a sequence at most, prompt included; None for all that the release can."""
    max_sequences: int = Field(default=64, ge=1)
    """Sequences computed in one step."""
    memory_share: float = Field(default=0.9, gt=0, le=1)
    """Part of a GPU's memory that vLLM may take."""
    kv_cache_bytes: int | None = Field(default=None, ge=1)
    """For keys and values. None is, on a GPU, what `memory_share` leaves; on a CPU, 2 GiB."""
    compiles: bool | None = None
    """Whether vLLM compiles the model. None: on a GPU only. On a CPU it makes starts long."""
    way: Literal["copy", "reload"] = "copy"
    """How a commit replaces weights. `copy` falls back to `reload`, vLLM's own and slower way, for
    models whose weights vLLM transforms (quantised, MLA, MoE), and wherever copying fails."""
    start_seconds: float = Field(default=300, gt=0)
    """Longest time for one start, at first and after it died: reading all of the release to prove
    it, vLLM's own start, and what is made ready for the first swap."""


class VllmEngineSettings(VllmSettings):
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """What vLLM computes in; `auto` is what the release's configuration names."""
