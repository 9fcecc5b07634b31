"""Defines the manifest of a release. A release is a folder of weights that can be served and never
changes. Its manifest is the file `release.json` in this folder."""

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
    """The digest covers the tensor's bytes, but not its name, dtype and shape. A swap does not load
    a tensor again if the live release has it with the same digest, dtype and shape."""

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
    """The natural logarithm of the probability of each token, given the tokens before it. The first
    token has no logprob, so there is one logprob fewer than there are tokens."""


class Probe(_Record):
    """Texts, and the log-probabilities (logprobs) that the job computed for them with the new
    weights. The server computes the logprobs again during a swap, and compares.

    Each logprob may differ by at most the bound for the server's dtype. If there is no bound for
    this dtype, the server cannot check the release and refuses it.
    """

    dtype: str
    """The dtype in which the job computed: `float32`, `bfloat16`, …"""
    texts: tuple[ProbeText, ...]
    bounds: dict[str, float]
    """Dtype of the server → the largest accepted absolute difference between two logprobs."""


class Lineage(_Record):
    """Where a release comes from. In a release that was published by hand, all fields may be
    empty."""

    parent: str | None = None
    """The release that training started from; None if training started from the base model."""
    base_model: str | None = None
    base_revision: str | None = None
    """The commit of the base model, if the base model came from a hub."""
    dataset: str | None = None
    """`owner/name`"""
    dataset_ref: str | None = None
    dataset_revision: str | None = None
    """The commit whose rows this release was trained on."""
    dataset_base_revision: str | None = None
    """The `dataset_revision` of the parent, if the job compared the rows with those of this commit.
    None if the job treated all rows as new."""
    data_digest: str | None = None
    """A digest of all rows, whatever their order. Two equal digests mean that no row changed."""
    mode: Literal["full", "delta"] | None = None
    settings_digest: str | None = None
    """A digest of the training settings that affect the weights; None if the digest was not
    recorded."""
    job_id: str | None = None
    delivery_ids: tuple[str, ...] = ()
    forced: str | None = None
    """Set if the gate refused the release and a person overruled the gate: the reason that the
    person gave, followed by the gate's reasons in parentheses."""


class Release(_Record):
    id: str = Field(pattern=r"^r\d{6,}-[0-9a-f]{8}$")
    pipeline: str
    created_at: str
    """UTC, ISO 8601."""
    format: Literal[1, 2] = 2
    """In format 1, a tensor entry has a `sha256`. In format 2, it has a `digest`, which begins with
    the name of its algorithm."""
    lineage: Lineage = Lineage()
    evaluation: dict[str, Any] | None = None
    files: dict[str, FileEntry]
    """Every file of the folder except the manifest. A file that is not listed is never read."""
    tensors: dict[str, TensorEntry]
    tied: dict[str, str] = {}
    """Alias → stored name. An alias is a tensor name that uses the bytes of another tensor and has
    no bytes of its own."""
    probe: Probe | None = None
    """None if the release was published by hand without a probe; the server then serves it without
    comparing logprobs."""

    @property
    def named_tensors(self) -> dict[str, TensorEntry]:
        """`tensors`, and each alias with what it stands for."""
        aliases = {
            alias: self.tensors[name] for alias, name in self.tied.items() if name in self.tensors
        }
        return {**self.tensors, **aliases}
