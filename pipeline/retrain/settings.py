"""What a retraining job is told. It is frozen into `JobSpec.settings` when the job is submitted."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrainSettings(_Settings):
    mode: Literal["auto", "delta", "full"] = "auto"
    """`delta` trains the served release on what changed plus a replay sample; `full` trains the
    base model on every row; `auto` takes `delta` unless rows were deleted or the served release's
    revision cannot be reached."""
    seed: int = 0


class GateSettings(_Settings):
    max_new_ratio: float = Field(default=1.01, gt=0)
    """Held-out loss on the rows of the new range, at most this many times the served release's."""
    max_old_ratio: float = Field(default=1.02, gt=0)
    """The same for held-out rows that were known before."""


class RetrainSettings(_Settings):
    pipeline: str
    dataset: str
    ref: str = "refs/heads/main"
    base_model: str = "preset:tiny"
    releases_dir: Path
    """`<home>/releases`: holds one folder per pipeline."""
    bases_dir: Path
    """`<home>/bases`: the base model of each pipeline, made or fetched once."""
    keep: int = Field(default=5, ge=1)
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()
    force_reason: str | None = None
    """Go past a refusing gate; the reason is logged in the outcome and the release."""
