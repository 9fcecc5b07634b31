"""Settings of the vLLM engine: `[serving.vllm]`, and the dtype, which all engines share."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class VllmSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

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
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The dtype in which vLLM computes; `serving.dtype` explains `auto`. The first release
    decides, because vLLM keeps its dtype while it runs."""
