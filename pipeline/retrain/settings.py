"""What a retraining job is told. It is frozen into `JobSpec.settings` when the job is submitted."""

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

logger = logging.getLogger(__name__)

HUGGING_FACE = "https://huggingface.co"

SkipIf = Literal["no_row_changed", "nothing_changed", "never"]

HubEndpoint = Annotated[str, Field(pattern=r"^(hub|https?://\S+)$")]


class _Settings(BaseModel):
    """Unknown keys are errors. Those of earlier releases are passed over with a warning."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    removed: ClassVar[Mapping[str, str]] = {}
    """Keys of the release before this one → what there is in their place, or why there is none.
    They stand in settings files, and in the specs of jobs that were queued before the upgrade."""

    @model_validator(mode="before")
    @classmethod
    def _pass_over_removed(cls, given: Any) -> Any:
        old = [key for key in cls.removed if isinstance(given, dict) and key in given]
        if not old:
            return given
        logger.warning(
            "settings of an earlier release are passed over: %s",
            "; ".join(f"{key} ({cls.removed[key]})" for key in old),
        )
        return {key: value for key, value in given.items() if key not in old}


class ColumnSettings(_Settings):
    """The names of the columns in the dataset, if they differ from the names here."""

    text: str | None = None
    """The column that is the `text` of a row. Unset: `text`. The keys below work the same way."""
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    tools: str | None = None
    """The column with the functions that the assistant of `messages` may call."""


class SplitSettings(_Settings):
    """Patterns of file names. If one is set, the splits do not follow from the dataset card or from
    the names of files."""

    train: tuple[str, ...] | None = None
    """Patterns of the files to train on. Unset: all files that are in no other split."""
    validation: tuple[str, ...] | None = None
    """Files that are never trained on. The gate measures them, beside the pushed rows."""
    test: tuple[str, ...] | None = None
    """Files that are not trained on. They are measured only if there is no validation split."""


class DataSettings(_Settings):
    files: tuple[str, ...] = ("**",)
    """Patterns of the files that contain rows: `*` matches any part of a name, `**` any folders. A
    file that usually contains none, such as README or LICENSE, must be named in full."""
    splits: SplitSettings = SplitSettings()
    config: str | None = None
    """Which of the `configs` in the dataset card to use. Unset: the default one, else all."""
    columns: ColumnSettings = ColumnSettings()
    held_out_ratio: float | None = Field(default=None, gt=0, lt=0.5)
    """The share of the rows that is never trained on. A hash of the content chooses them. Unset: no
    row is held out, except a small share of a `text` dataset that has no split of its own and at
    least 1,000 rows when it is first trained on."""
    max_row_bytes: int = Field(default=1 << 20, ge=1)
    """A larger row fails the job; the error names its file and line."""


class TrainSettings(_Settings):
    removed = {
        "held_out_ratio": "what is held out is the dataset's own split, or held_out_ratio under "
        "[pipelines.data]",
        "min_held_out_rows": "what is held out is the dataset's own split",
        "max_row_bytes": "it stands under [pipelines.data]",
        "evaluations": "training ends when the changed rows are learned",
        "patience": "training ends when the changed rows are learned",
        "enough_loss": "training ends when the changed rows are learned",
    }

    mode: Literal["auto", "delta", "full"] = "auto"
    """`delta` trains the served release on what changed plus a replay sample; `full` trains the
    base model on every row. `auto` takes `delta` unless there is no served release, rows of plain
    text or more than 100 rows were deleted, or the served release's revision is not in the history
    of the new one (a force-push). An edited row is not a deleted one: its prompt is there again
    with another completion, or, for plain text, other rows stand in its place in the same file."""
    seed: int = 0
    learning_rate: float | None = Field(default=None, gt=0)
    """At the peak of the schedule. Unset, 1e-3 for a preset, whose weights start at random, 2e-3
    for the low-rank matrices of a base model that was trained before, and 5e-5 where all weights
    of such a base model are trained."""
    delta_learning_rate_ratio: float = Field(default=0.7, gt=0)
    """A delta's peak learning rate, as a share of a full training's."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps in which the learning rate rises; a cosine takes it down to a tenth."""
    weight_decay: float = Field(default=0.1, ge=0)
    """On matrices; never on norms and biases."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Longer gradients are scaled down to this."""
    max_epochs: float = Field(default=12.0, gt=0)
    """Passes over rows of plain text in a full training, at most. Rows with an answer are visited
    until the model says the answer."""
    delta_max_epochs: float = Field(default=8.0, gt=0)
    """Passes over changed rows of plain text in a delta, at most."""
    max_tokens: int = Field(default=250_000, ge=1)
    """Training tokens of a full training, at most: what bounds its time. A laptop's two cores
    train the preset on about 3,000 tokens/s. Where changed rows are not learned within it, training
    goes on once with as many tokens again. Where deltas have taken the served release further than
    this, a full training may go as far, up to four times this: it is measured against it."""
    delta_tokens_ratio: float = Field(default=0.24, gt=0, le=1)
    """Training tokens of a delta on plain text, as a share of what a full training would take now;
    more, up to `max_tokens`, where the changed rows would not be seen once. A delta on rows with an
    answer ends when the model says them, within `max_tokens`."""
    delta_min_share: float = Field(default=0.5, gt=0, le=1)
    """The weights of a delta on plain text are averaged with the served release's where that lowers
    the loss on new and known rows together: what it forgot comes back. This is the least share of
    its own; 1 keeps them as they are."""
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
    evaluation_tokens: int = Field(default=16_384, ge=1)
    """Tokens of one measurement during training, at most: rows that must be right before training
    ends, or held-out text."""
    lora_rank: int | None = Field(default=None, ge=0)
    """Train matrices of this rank beside frozen weights (LoRA), merged into the release. Unset, 128
    for a base model that was trained before; for a preset, whose weights start at random, and with
    0, all weights are trained."""
    anchors: Path | None = None
    """A file of everyday prompts in the place of the package's own, one JSON object per line with
    `kind`, `measured` and `prompt`. A base model that was trained before answers them once; its
    answers are mixed into training, or, where `measured`, tell how far the model has drifted. A
    relative path starts at the folder of this file."""
    anchor_ratio: float = Field(default=0.5, ge=0)
    """Tokens of the base model's own answers that are mixed in for each token that is learned. A
    delta mixes in twice as many."""
    num_processes: int = Field(default=1, ge=1, le=64)
    """Processes that share each step, one GPU each where there are any. The losses are those of one
    process."""
    report_to: tuple[Literal["tensorboard", "trackio", "wandb"], ...] = ()
    """Where losses go beside the job's `metrics.jsonl`. What these store lies in the job's folder;
    W&B stays offline unless the environment has WANDB_MODE."""
    checkpoint_seconds: float = Field(default=30.0, gt=0)
    """A restarted job loses at most about this much training."""

    def digest(self) -> str:
        """Of the settings that shape the weights, where they are not the defaults: a new key, or
        another default, makes no release look as if it were trained with other settings."""
        chosen = self.model_dump(mode="json", exclude=_WITHOUT_EFFECT, exclude_defaults=True)
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


_WITHOUT_EFFECT = {
    "micro_batch_tokens",
    "num_processes",
    "report_to",
    "checkpoint_seconds",
}
"""Settings of training that decide how it is computed and reported, but not what is learned."""


class GateSettings(_Settings):
    removed = {
        "max_new_ratio": "max_loss_ratio",
        "max_old_ratio": "max_loss_ratio",
        "max_removal_ratio": "nothing",
        "tolerance": "nothing",
        "min_rows": "nothing",
        "sigmas": "nothing",
    }

    min_learned: float = Field(default=0.9, ge=0, le=1)
    """Share of the changed rows that the model must say after the training, and of the deleted ones
    that it must say no more. Rows of plain text, and rows that contradict each other, do not
    count."""
    min_kept: float = Field(default=0.95, ge=0, le=1)
    """Share of the rows known before, as far as the served release says them, that the new release
    must still say. Fewer than 20 rows are never held against it."""
    max_base_drift: float = Field(default=0.3, ge=0, le=1)
    """Share of the base model's own answers to everyday prompts, in tokens, that may have become
    another answer. The prompts are never trained on."""
    max_anchor_tokens: int = Field(default=4_000, ge=1)
    """Tokens of these answers that are measured, at most."""
    golden: Path | None = None
    """A `.jsonl` file of questions with the answers that every release must give: rows with
    `prompt` or `messages`, and `expected`. One that the served release answers must stay right. A
    relative path starts at the folder of this file."""
    max_loss_ratio: float = Field(default=1.02, gt=0)
    """The loss on held-out rows, and on rows of plain text known before, at most this many times
    the served release's."""
    max_lost_ratio: float = Field(default=0.5, ge=0, le=1)
    """Share of the rows known before that a commit may delete or rewrite."""
    max_noise_ratio: float = Field(default=0.2, ge=0, le=1)
    """Share of the changed rows that may be noise: that the served weights find no likelier than
    the same tokens in random order."""
    max_tokens: int = Field(default=16_384, ge=1)
    """Tokens of each group of rows that is measured, at most: changed rows, rows known before,
    deleted rows, held-out rows."""


def is_git_url(dataset: str) -> bool:
    """Is the dataset a git repository by its URL, and no `owner/name` on the hub?"""
    return "://" in dataset or "@" in dataset


class RetrainSettings(_Settings):
    pipeline: str
    dataset: str
    """`owner/name` on a hub, or the git URL of a repository elsewhere."""
    dataset_endpoint: HubEndpoint = "hub"
    """The hub that has `owner/name`: `hub` for the stack's own, or the URL of another hub."""
    ref: str = "refs/heads/main"
    base_model: str = "preset:tiny"
    """`preset:tiny`, the folder of a checkpoint, or the id of a model on a hub."""
    base_model_endpoint: HubEndpoint = HUGGING_FACE
    """The hub that such an id is looked up on; `hub` for the one that has the dataset."""
    releases_dir: Path
    """`<home>/releases`: holds one folder per pipeline."""
    bases_dir: Path
    """`<home>/bases`: the base model of each pipeline, made or fetched once."""
    snapshots_dir: Path | None = None
    """Where dataset revisions are downloaded to. Unset, `snapshots` beside the releases."""
    keep: int = Field(default=5, ge=2)
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()
    force_reason: str | None = None
    """Go past a refusing gate; the reason is logged in the outcome and the release."""
    skip_if: SkipIf = "no_row_changed"
    """When the job ends as `unchanged`, without training: for a push, if no row changed since the
    served release; for a job by hand, if the training settings are the same too (a release that
    does not record them counts as trained with the same); never, if a person asked for a mode or
    for other settings."""
