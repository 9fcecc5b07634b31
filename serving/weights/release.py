"""`Release`: the manifest (`release.json`) of a release, which is an immutable folder that can be
served."""

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
    """The shard that holds the tensor."""
    dtype: str
    """The dtype in the spelling of safetensors: `F32`, `BF16`, …"""
    shape: tuple[int, ...]
    digest: str = Field(pattern=r"^(blake3|sha256):[0-9a-f]{64}$")
    """The digest of the tensor's bytes, without its name, dtype and shape. A swap does not load a
    tensor whose digest has not changed."""

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
    """Natural log of the probability of each token, given the tokens before it. The first token has
    no logprob, so there is one logprob fewer than there are tokens."""


class Probe(_Record):
    """The logprobs that the job computed with the new weights. The server computes them again and
    compares.

    Each logprob of the server may differ by at most the bound of the server's dtype. A server whose
    dtype has no bound cannot prove the release and therefore refuses it.
    """

    dtype: str
    """The dtype that the job computed in: `float32`, `bfloat16`, …"""
    texts: tuple[ProbeText, ...]
    bounds: dict[str, float]
    """Dtype of the server → the largest accepted absolute difference of a logprob."""


class Lineage(_Record):
    """Where a release comes from. In a release that was published by hand, all fields may be
    empty."""

    parent: str | None = None
    """The release that training started from; None if training started from the base model."""
    base_model: str | None = None
    base_revision: str | None = None
    """The commit of the base model, where it came from a hub."""
    dataset: str | None = None
    """`owner/name`"""
    dataset_ref: str | None = None
    dataset_revision: str | None = None
    """The commit whose rows this release was trained on."""
    dataset_base_revision: str | None = None
    """The parent's `dataset_revision`: only rows that changed since then are new. None if all rows
    were read."""
    data_digest: str | None = None
    """A digest of all rows that does not depend on their order: equal digests mean that no row
    changed."""
    mode: Literal["full", "delta"] | None = None
    settings_digest: str | None = None
    """A digest of the training settings that affect the weights; None if it was not recorded."""
    job_id: str | None = None
    delivery_ids: tuple[str, ...] = ()
    forced: str | None = None
    """Why a person overruled the gate's refusal; None if the gate passed the release."""


class Release(_Record):
    id: str = Field(pattern=r"^r\d{6,}-[0-9a-f]{8}$")
    pipeline: str
    created_at: str
    """UTC, ISO 8601."""
    format: Literal[1, 2] = 2
    """In format 1, a tensor has a `sha256`; in format 2, it has a `digest` that names its
    algorithm."""
    lineage: Lineage = Lineage()
    evaluation: dict[str, Any] | None = None
    files: dict[str, FileEntry]
    """Every file of the folder except the manifest. A file that is not listed is never read."""
    tensors: dict[str, TensorEntry]
    tied: dict[str, str] = {}
    """Alias → stored name, for names that share another tensor's storage and have no bytes of their
    own."""
    probe: Probe | None = None
    """None if the release was published by hand without a probe; the server then skips the
    proof."""
