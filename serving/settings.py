"""What a server is told."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from serving.engines.torch_engine.settings import TorchSettings
from serving.engines.vllm_settings import VllmSettings


class ServingSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """Address to listen on. Anything but loopback needs `api_key`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port to listen on. 0 takes a free one, for a server on its own; a stack needs a number."""
    engine: Literal["torch", "vllm", "sglang", "echo"] = "torch"
    """`torch` is embedded, `vllm` runs beside, `sglang` stands behind, at `upstream`; `echo` makes
    up tokens from the release's digest, for tests of clients."""
    torch: TorchSettings = TorchSettings()
    """How much the embedded engine takes on."""
    vllm: VllmSettings = VllmSettings()
    """How vLLM is started, and how its weights are replaced."""
    upstream: str = "http://127.0.0.1:30000"
    """Where the SGLang server listens. It must see the releases under the same paths."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the engine computes in. A release must have a probe bound for it."""
    api_key: SecretStr | None = None
    """Bearer token for `/v1`; none means that everyone who reaches the port may ask."""
    api_key_file: Path | None = None
    """More of them, one per line; empty lines and lines that begin with `#` are not."""
    request_seconds: float | None = Field(default=None, gt=0)
    """Longest time for one answer; after that a request gets 504, a stream an error event."""
    max_queue: int = Field(default=256, ge=1)
    """Requests answered or waiting at the same time; one more gets 429."""
    max_sequences: int = Field(default=128, ge=1)
    """Sequences of one request: prompts times `n` or `best_of`."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """Larger request bodies get 413."""
    drain_seconds: float = Field(default=60, gt=0)
    """How long a swap waits for requests that must end first; after that it is `deferred`."""
    phase_seconds: float = Field(default=600, gt=0)
    """Longest time for one phase of a swap; after that it has `failed`."""
    barrier_seconds: float = Field(default=30, gt=0)
    """Longest time each for commit and probe while new requests are held back. A commit of SGLang,
    which reads the weights meanwhile, has more: ten minutes."""
