"""What a retraining job is told. It is frozen into `JobSpec.settings` when the job is submitted."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

HUGGING_FACE = "https://huggingface.co"

BaseModelEndpoint = Annotated[str, Field(pattern=r"^(hub|https?://\S+)$")]


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class TrainSettings(_Settings):
    mode: Literal["auto", "delta", "full"] = "auto"
    """`delta` trains the served release on what changed plus a replay sample; `full` trains the
    base model on every row. `auto` takes `delta` unless there is no served release, rows were
    deleted, or the served release's revision is not in the history of the new one (a force-push).
    An edited row is not a deleted one: its prompt is there again with another completion, or, for
    plain text, other rows stand in its place in the same file."""
    seed: int = 0
    learning_rate: float | None = Field(default=None, gt=0)
    """At the peak of the schedule. Unset, 1e-3 for a preset, whose weights start at random,
    5e-5 for a base model that was trained before, and 5e-4 for LoRA."""
    delta_learning_rate_ratio: float = Field(default=0.7, gt=0)
    """A delta's peak learning rate, as a share of a full training's."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises; a cosine takes it down to a tenth."""
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices; never on norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this."""
    max_epochs: float = Field(default=12.0, gt=0)
    """Passes over the training rows of a full training, at most."""
    delta_max_epochs: float = Field(default=8.0, gt=0)
    """Passes over the new rows of a delta, at most."""
    max_tokens: int = Field(default=250_000, ge=1)
    """Training tokens of a full training, at most: what bounds its time. A laptop's two cores
    train the preset on about 3,000 tokens/s. Where deltas have taken the served release further
    than this, a full training may go as far, up to four times this: it is measured against it."""
    delta_tokens_ratio: float = Field(default=0.24, gt=0, le=1)
    """A delta's training tokens, at most, as a share of what a full training would take now."""
    delta_min_share: float = Field(default=0.5, gt=0, le=1)
    """A delta's weights are averaged with the served release's where that lowers the loss on new
    and known held-out rows together: what it forgot comes back. This is the least share of its own;
    1 keeps them as they are."""
    replay_ratio: float = Field(default=3.0, ge=0)
    """Tokens of rows known before that a delta mixes in, for each token of its new rows."""
    min_replay_tokens: int = Field(default=16_384, ge=0)
    """A delta of a few rows replays at least this much, as far as there are rows."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """Tokens between two updates of the weights. Unset, the training is divided into about 1,000
    steps of at least 128 and at most 4,096 tokens: few rows are learned faster in small steps."""
    micro_batch_tokens: int = Field(default=8_192, ge=1)
    """Tokens computed at once; a step of more accumulates gradients."""
    max_length: int | None = Field(default=None, ge=8)
    """Tokens that the model looks at together, at most. Unset, 256 for a preset and 1,024 for a
    base model that was trained before, and never more than the model's context. Longer texts are
    cut into pieces of this length; a longer prompt loses its beginning, a longer completion its
    end."""
    max_row_bytes: int = Field(default=1 << 20, ge=1)
    """A row above this size fails the job with its file and line."""
    held_out_ratio: float = Field(default=0.08, gt=0, lt=0.5)
    """Share of the rows, chosen by a hash of their content, that is never trained on."""
    min_held_out_rows: int = Field(default=4, ge=1)
    """Held out of a small dataset, but never more than a quarter of it."""
    evaluations: int = Field(default=12, ge=1)
    """How often the held-out loss is measured during training; the best weights are kept."""
    evaluation_tokens: int = Field(default=4_096, ge=1)
    """Held-out tokens of one such measurement, at most. An average is measured on up to four times
    as many; the gate measures all of them."""
    patience: int = Field(default=3, ge=1)
    """Training stops after this many measurements without a better one."""
    enough_loss: float = Field(default=0.005, ge=0)
    """Training stops at this held-out loss, in nats per token: the rows are known by heart."""
    lora_rank: int | None = Field(default=None, ge=1)
    """Train matrices of this rank beside the frozen weights (LoRA), merged into the release; needs
    `hotpush[lora]`. For base models that were trained before: a preset's weights start at random.
    The usual learning rate is then ten times as high. Unset, all weights are trained."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that share each step, one GPU each where there are any. The losses are those of one
    process."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where losses go beside the job's `metrics.jsonl`. What these store lies in the job's folder;
    W&B stays offline unless the environment has WANDB_MODE."""
    checkpoint_seconds: float = Field(default=30.0, gt=0)
    """A restarted job loses at most about this much training."""


class GateSettings(_Settings):
    max_new_ratio: float = Field(default=1.01, gt=0)
    """Held-out loss on the rows of the new range, at most this many times the served release's."""
    max_old_ratio: float = Field(default=1.02, gt=0)
    """The same for held-out rows that were known before."""
    max_removal_ratio: float = Field(default=1.15, gt=0)
    """In the place of both, where it is larger, when rows were deleted and all others are therefore
    learned anew from the base model on: that what was deleted is no longer served matters more
    than what a long chain of deltas had gained."""
    tolerance: float = Field(default=0.01, ge=0)
    """In nats per token. A loss that is higher by less than this is never held against a release:
    of two models that both know a row by heart, one is easily 2 % better at nothing."""
    min_rows: int = Field(default=4, ge=1)
    """With fewer held-out rows than this in the new range, or known before, all held-out rows are
    judged together, against the larger of the two ratios."""
    max_lost_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the rows known before that a commit may delete or rewrite. What is gone cannot speak
    for itself on the held-out rows: a column that was shuffled looks like an edit of every row."""
    max_noise_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of the new held-out rows that may be noise: that the new weights find no likelier than
    the same tokens in random order. Beyond the share of it in the rows known before. Where fewer
    than `min_rows` are held out and look so, the served weights are asked about all new rows."""
    sigmas: float = Field(default=1.0, ge=0)
    """How far above its ratio a loss or a share of noise must be to refuse, in standard errors; 0
    refuses on the ratio alone."""


def is_git_url(dataset: str) -> bool:
    """Is the dataset a git repository by its URL, and no `owner/name` on the hub?"""
    return "://" in dataset or "@" in dataset


class RetrainSettings(_Settings):
    pipeline: str
    dataset: str
    """`owner/name` on the hub, or the git URL of a repository elsewhere."""
    ref: str = "refs/heads/main"
    base_model: str = "preset:tiny"
    """`preset:tiny`, the folder of a checkpoint, or the id of a model on a hub."""
    base_model_endpoint: BaseModelEndpoint = HUGGING_FACE
    """The hub that such an id is looked up on; `hub` for the one that has the dataset."""
    releases_dir: Path
    """`<home>/releases`: holds one folder per pipeline."""
    bases_dir: Path
    """`<home>/bases`: the base model of each pipeline, made or fetched once."""
    snapshots_dir: Path | None = None
    """Where dataset revisions are downloaded to. Unset, `snapshots` beside the releases."""
    keep: int = Field(default=5, ge=2)
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()
    force_reason: str | None = None
    """Go past a refusing gate; the reason is logged in the outcome and the release."""
