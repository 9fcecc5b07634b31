"""`Release`: the manifest (`release.json`) of an immutable folder that can be served."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

RELEASE_FILE = "release.json"


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FileEntry(_Record):
    size: int = Field(ge=0)
    sha256: str


class TensorEntry(_Record):
    file: str
    """The shard that holds it."""
    dtype: str
    """As safetensors spells it: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    digest: str = Field(pattern=r"^(blake3|sha256):[0-9a-f]{64}$")
    """Of the tensor's bytes alone: equal digests mean that a swap need not load it again."""

    @model_validator(mode="before")
    @classmethod
    def _read_format_1(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "sha256" not in raw:
            return raw
        rest = {key: value for key, value in raw.items() if key != "sha256"}
        return {"digest": f"sha256:{raw['sha256']}"} | rest


class ProbeText(_Record):
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Natural log, of each token after the first given those before it: one fewer than tokens."""


class Probe(_Record):
    """What the job measured under the new weights, for the server to measure again.

    A server that computes in some dtype must agree on every logprob within the bound that `bounds`
    has for it; without one it cannot prove this release, and refuses it.
    """

    dtype: str
    """The dtype that the job computed in: `float32`, `bfloat16`, …"""
    texts: tuple[ProbeText, ...]
    bounds: dict[str, float]
    """Serving dtype → largest absolute difference of a logprob that is still agreement."""


class Lineage(_Record):
    """Where a release comes from. A folder published by hand may know none of it."""

    parent: str | None = None
    """The release it was trained from; None for one trained from the base model."""
    base_model: str | None = None
    dataset: str | None = None
    """`owner/name`"""
    dataset_ref: str | None = None
    dataset_revision: str | None = None
    """The commit whose rows this release has seen."""
    dataset_base_revision: str | None = None
    """The commit that training started from, the parent's; None when all rows were read."""
    data_digest: str | None = None
    """Of all rows as a multiset: equal digests mean that no row changed."""
    mode: Literal["full", "delta"] | None = None
    job_id: str | None = None
    delivery_ids: tuple[str, ...] = ()
    forced: str | None = None
    """Why the gate's refusal was overruled; None where the gate let it through."""


class Release(_Record):
    id: str = Field(pattern=r"^r\d{6,}-[0-9a-f]{8}$")
    pipeline: str
    created_at: str
    """UTC, ISO 8601."""
    format: Literal[1, 2] = 2
    """1 has a sha256 of each tensor, 2 a digest that names its algorithm."""
    lineage: Lineage = Lineage()
    evaluation: dict[str, Any] | None = None
    files: dict[str, FileEntry]
    """Every file of the folder but this one. What is not listed is not read."""
    tensors: dict[str, TensorEntry]
    tied: dict[str, str] = {}
    """Names that share another tensor's storage and are not stored: alias → stored name."""
    probe: Probe | None = None
    """None for a folder published by hand without one; a server then scores nothing."""
