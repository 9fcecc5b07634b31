"""What a server is told."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

from serving.engine_choice import EngineName, choose_engine
from serving.engines.torch_engine.settings import TorchSettings
from serving.engines.vllm_settings import VllmSettings
from serving.tool_calls import FormatName


class ServingSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. Any address but loopback needs `api_key`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on. 0 takes a free one; in a stack it must be a number above 0."""
    engine: EngineName | Literal["auto"] = "auto"
    """What computes the answers. `auto` is `vllm` if there is a GPU and vLLM is installed, and
    otherwise `torch`. `torch` runs inside the server, `vllm` in processes that the
    server starts; `sglang` is a server of your own, at `upstream`. `echo` is for tests of clients:
    it makes up tokens from the release's digest."""
    torch: TorchSettings = TorchSettings()
    """Limits of the torch engine."""
    vllm: VllmSettings = VllmSettings()
    """How vLLM is started, and how its weights are replaced."""
    upstream: str = "http://127.0.0.1:30000"
    """The URL of the SGLang server. It must see the releases under the same paths."""
    tool_format: FormatName | Literal["auto"] = "auto"
    """How the model writes calls of tools. `auto` looks at the chat template of each release."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """The type of number to compute in. A release must have a probe bound for it."""
    api_key: SecretStr | None = None
    """The bearer token for `/v1`. Unset: everyone who reaches the port may send requests."""
    api_key_file: Path | None = None
    """A file with more such tokens, one per line. Empty lines and `#` comments are skipped."""
    cors_origins: tuple[str, ...] = ()
    """Origins whose pages a browser lets read the answers, such as `https://chat.example.com`; `*`
    for all. Without any, only pages of this server can."""
    request_seconds: float = Field(default=600, gt=0)
    """Time limit of one answer. After that a request gets 504, and a stream an error event."""
    max_queue: int = Field(default=256, ge=1)
    """How many requests may run or wait at once. One more gets 429."""
    max_sequences: int = Field(default=128, ge=1)
    """How many sequences one request may ask for: prompts times `n` or `best_of`."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """A larger request body gets 413."""
    drain_seconds: float = Field(default=60, gt=0)
    """How long a swap waits for requests that must end first. After that it is `deferred`."""
    phase_seconds: float = Field(default=600, gt=0)
    """Time limit of one phase of a swap. After that the swap has `failed`."""

    @property
    def start_seconds(self) -> float:
        """The longest time until the engine has loaded its first release."""
        return (
            self.vllm.start_seconds
            if choose_engine(self.engine).name == "vllm"
            else self.phase_seconds
        )

    barrier_seconds: float = Field(default=30, gt=0)
    """Time limit of the commit, and of the probe, while new requests wait. A commit of SGLang has
    ten minutes instead, because it reads the weights in that time."""
