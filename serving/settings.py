"""The settings of a completion server: the table `[serving]` of pipeline.toml."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from serving.engines import settings as engines


class ServingSettings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    host: str = "127.0.0.1"
    """The address to listen on. An address that is not loopback needs `api_key`."""
    port: int = Field(default=8000, ge=0, le=65535)
    """The port to listen on. 0 chooses a free port, but is not allowed in a stack."""
    engine: engines.EngineName | Literal["auto"] = "auto"
    """What computes the answers. `auto` is `vllm` if the machine has an NVIDIA GPU and vLLM is
    installed, and otherwise `torch`. `torch` runs inside the server, and `vllm` runs in processes
    that the server starts."""
    torch: engines.TorchSettings = engines.TorchSettings()
    """Limits of the torch engine."""
    vllm: engines.VllmSettings = engines.VllmSettings()
    """How vLLM is started, and how a swap replaces its weights."""
    dtype: engines.DtypeSetting = "auto"
    """The dtype (number type) in which the engine computes. `auto` is the dtype in which the
    release is stored, if the hardware is fast in it and the release's probe has a bound for it;
    otherwise float32. If you name a dtype, the probe of a release must have a bound for it."""
    api_key: SecretStr | None = None
    """The bearer token for `/v1`. Without it, everyone who can reach the port may send requests."""
    cors_origins: tuple[str, ...] = ()
    """The origins whose pages may read the answers in a browser, such as
    `https://chat.example.com`; `*` means all. By default, only pages of this server can read them.
    """
    request_seconds: float = Field(default=600, gt=0)
    """Time limit of one answer. After this time a request gets 504, and a stream gets an error
    event."""
    max_queue: int = Field(default=256, ge=1)
    """How many requests may run or wait at once. Every further request gets 429."""
    max_sequences: int = Field(default=128, ge=1)
    """How many sequences one request may ask for: the number of its prompts times `n`."""
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    """A larger request body gets 413."""
    drain_seconds: float = Field(default=60, gt=0)
    """How long a swap waits for requests that must end first. After this time the swap ends as
    `deferred`."""
    phase_seconds: float = Field(default=600, gt=0)
    """Time limit of the preflight of a swap, of its stage, and of its probe if no requests wait for
    the probe. After this time the swap ends as `failed`. A stage that starts vLLM has the time
    limit `start_seconds` of vLLM instead."""
    barrier_seconds: float = Field(default=30, gt=0)
    """Time limit of the commit of a swap, of its probe if new requests wait for the probe, of one
    write of the record `served.json`, and of the unloading of a release."""
    ground: Literal["off", "assist"] = "off"
    """With `assist`, a question is put to the model in the words of the row that a word search
    finds for it. The header `X-Asked-As` of the answer names the row."""
    follow_seconds: float = Field(default=30, gt=0)
    """`pipeline serve --follow` looks this often whether the hub has another release."""

    @field_validator("api_key")
    @classmethod
    def _can_be_sent(cls, api_key: SecretStr | None) -> SecretStr | None:
        key = "key" if api_key is None else api_key.get_secret_value()
        if not key or key != key.strip() or not (key.isascii() and key.isprintable()):
            raise ValueError(
                "it is empty, begins or ends with a space or a newline, or has a character that is "
                "not ASCII; no client can send such a key"
            )
        return api_key

    @property
    def start_seconds(self) -> float:
        """The longest time until the engine has loaded its first release."""
        is_vllm = engines.choose_engine(self.engine).name == "vllm"
        return self.vllm.start_seconds if is_vllm else self.phase_seconds
