"""The settings of a retraining job. When a job is submitted, `JobSpec.settings` gets a copy of
them. Later changes of the settings do not affect this job."""

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

HUGGING_FACE = "https://huggingface.co"

SkipIf = Literal["no_row_changed", "nothing_changed", "never"]

HubEndpoint = Annotated[str, Field(pattern=r"^(hub|https?://\S+)$")]


class _Settings(BaseModel):
    """An unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ColumnSettings(_Settings):
    """The names of the columns in the dataset, if they differ from the names here."""

    text: str | None = None
    """The column that is the `text` of a row. Unset: `text`. The keys below work the same way."""
    question: str | None = None
    """A row of a question and its `answer` is a conversation."""
    answer: str | None = None
    prompt: str | None = None
    """`prompt` and `completion` are learned as they are, without the chat template."""
    completion: str | None = None
    messages: str | None = None
    tools: str | None = None
    """The column with the functions that the assistant of `messages` may call."""
    paraphrases: str | None = None
    """The column with a list of other wordings of the question."""


class SplitSettings(_Settings):
    """Patterns of file names. If at least one is set, the dataset card and the names of files no
    longer decide about the splits."""

    train: tuple[str, ...] | None = None
    """Patterns of the files to train on. Unset: all files that are in no other split."""
    validation: tuple[str, ...] | None = None
    """Patterns of the files that are never trained on. The gate (the check of the new weights
    before they are served) measures their rows and the pushed rows."""
    test: tuple[str, ...] | None = None
    """Patterns of other files that are never trained on. Their rows are measured only if there is
    no validation split."""


class DataSettings(_Settings):
    files: tuple[str, ...] = ("**",)
    """Patterns of the files that contain rows: `*` matches any part of a name, `**` any folders. A
    file that usually contains none, such as README or LICENSE, must be named in full."""
    splits: SplitSettings = SplitSettings()
    config: str | None = None
    """Which of the `configs` in the dataset card to use. Unset: the default config. If the card has
    no default config, all configs."""
    columns: ColumnSettings = ColumnSettings()
    held_out_ratio: float | None = Field(default=None, gt=0, lt=0.5)
    """The share of the rows that is never trained on. A hash of the content chooses them. Unset:
    0.032 of the rows of a dataset that has only `text`, at least 1,000 rows, and no held-out split
    of its own; otherwise none."""


class TrainSettings(_Settings):
    mode: Literal["auto", "delta", "full"] = "auto"
    """`delta` trains the served release on the changed rows and a sample of the others (replay).
    `full` trains the base model on all rows. `auto` means `delta`, but it means `full` in these
    cases:
    - There is no served release, or it was made from another base model, or no row has changed.
    - Rows of plain text were deleted, or more than 100 rows in all.
    - Rows that were trained on are held out now.
    - The revision that the served release was trained on is not in the history of the new revision
      (a force-push), or its rows cannot be read, or are other rows with the present settings.

    An edited row does not count as deleted. A row is edited if its prompt is there again with
    another completion. Plain text is edited if new rows stand in its place in the same file."""
    seed: int = 0
    wordings: int | None = Field(default=None, ge=0)
    """How many other wordings of each question without `paraphrases` are trained on: those of a
    larger model (`paraphrase`), or else made-up ones. Unset: all of a larger model but the last
    one; without one, 8 for a base model that was trained before, and 0 for a preset. More than 8
    only if the token budget is enough to visit each twice. The word search of `ground` has all
    those of a larger model."""
    learning_rate: float | None = Field(default=None, gt=0)
    """The learning rate at its highest point. Unset: 1e-3 for a preset, whose weights start at
    random. For a base model that was trained before, 1e-3 with low-rank matrices (`lora_rank`), and
    5e-5 if all weights are trained."""
    delta_learning_rate_ratio: float = Field(default=0.7, gt=0)
    """The highest learning rate of a delta, as a share of that of a full training."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """The share of the steps in which the learning rate rises. Afterwards it falls along a cosine
    to a tenth."""
    weight_decay: float = Field(default=0.1, ge=0)
    """The weight decay of matrices. Norms and biases have none."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """A gradient that is longer than this is scaled down to this length."""
    max_epochs: float = Field(default=12.0, gt=0)
    """The largest number of passes over rows of plain text in a full training. Rows with an answer
    are visited until the model says the answer."""
    delta_max_epochs: float = Field(default=8.0, gt=0)
    """The largest number of passes over changed rows of plain text in a delta."""
    max_tokens: int = Field(default=250_000, ge=1)
    """The token budget: the largest number of tokens that a full training trains on. It bounds the
    time. Two cores of a laptop train the preset on about 3,000 tokens per second. A training on
    rows with an answer ends when the model says the answers, and may use three times as many. The
    served release may have been trained on more tokens than this, by several deltas. The new
    weights are compared with it, so a full training may then use as many tokens, but at most four
    times this number."""
    delta_tokens_ratio: float = Field(default=0.24, gt=0, le=1)
    """The token budget of a delta on plain text, as a share of the budget that a full training
    would have. If this is too little to visit each changed row once, the delta gets more, but never
    more than the full budget. A delta on rows with an answer has the full budget, and ends when the
    model says the answers."""
    replay_ratio: float = Field(default=3.0, ge=0)
    """How many tokens of unchanged rows a delta mixes in for each token of its new rows
    (replay)."""
    min_replay_tokens: int = Field(default=16_384, ge=0)
    """A delta on plain text mixes in at least this many tokens of unchanged rows, if there are as
    many and the budget allows it."""
    tokens_per_step: int | None = Field(default=None, ge=1)
    """How many tokens a step (one update of the weights) trains on. Unset: a thousandth of the
    token budget, but at least 128 and at most 4,096 tokens. A full training of a base model that
    was trained before has steps of at least 448 tokens, if a pass has 16 of them. A few rows are
    learned faster in small steps."""
    micro_batch_tokens: int = Field(default=8_192, ge=1)
    """How many tokens a process computes at once. A larger step is computed in several parts, and
    adds up their gradients."""
    max_length: int | None = Field(default=None, ge=8)
    """The largest number of tokens that the model trains on as one sequence. Unset: 256 for a
    preset, and 1,024 for a base model that was trained before. It is never more than the model's
    context. A longer text is cut into pieces of this length. If a row with an answer is longer, a
    prompt of more than half of this length loses its beginning, and an answer of more than half
    loses its end."""
    evaluation_tokens: int = Field(default=16_384, ge=1)
    """The largest number of tokens of one measurement during training. It measures the rows that
    the model must say before training ends, or held-out text."""
    lora_rank: int | None = Field(default=None, ge=0)
    """The rank of low-rank training (LoRA): the weights stay frozen, only small matrices of this
    rank are trained, and the release contains both merged. With 0, all weights are trained. Unset:
    64 for a base model that was trained before, and 0 for a preset, whose weights start at
    random."""
    anchors: Path | None = None
    """A file of everyday prompts (anchors) to use instead of those in the package. Each line is a
    JSON object with `kind`, `measured` and `prompt`. A base model that was trained before answers
    each prompt once. If `measured` is false, the answer is mixed into training. If it is true, the
    answer is only measured, and shows how far the new model has moved away from the base model. A
    relative path starts at the folder of the settings file."""
    anchor_ratio: float = Field(default=0.5, ge=0)
    """How many tokens of the base model's own answers are mixed in for each token of the rows. A
    delta mixes in twice as many. Each counts as much as four tokens of the rows."""
    num_processes: int | None = Field(default=None, ge=1)
    """How many processes share a training on each machine, one for each GPU: each has a part of the
    weights, and computes a part of each step. Unset: as many as `resources.gpus`, or one."""
    checkpoint_seconds: float = Field(default=30.0, gt=0)
    """The time between two checkpoints. If a job is killed and restarted, it loses at most about
    this much training."""
    checkpoint_url: str | None = Field(default=None, pattern=r"^(/|[a-z0-9]+://).*[^/]$")
    """A folder that all machines of the jobs share, or a store, such as `s3://bucket/folder` (which
    needs s3fs) or `gs://bucket/folder` (gcsfs). Each process writes its part of a checkpoint there,
    and an attempt on another machine continues from it. The training waits meanwhile, so with large
    models, choose larger `checkpoint_seconds`. Several machines for one training need it."""

    def digest(self) -> str:
        """A hash of the settings that affect the weights. Settings with their default value are
        left out. So an old release keeps the same digest when a new version adds a key or changes a
        default."""
        chosen = self.model_dump(mode="json", exclude=_WITHOUT_EFFECT, exclude_defaults=True)
        return hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()


_WITHOUT_EFFECT = {
    "micro_batch_tokens",
    "num_processes",
    "checkpoint_seconds",
    "checkpoint_url",
}
"""Settings that affect how a training is computed, but not what it learns."""


class ParaphraseSettings(_Settings):
    """A larger model that writes other wordings of the questions in the dataset. A pretrained base
    model then answers many more questions that are asked in words which nobody has pushed."""

    url: Annotated[str, Field(pattern=r"^https?://\S+[^/\s]$")]
    """Of a server with the OpenAI routes, such as `http://127.0.0.1:8001/v1`. It gets the questions
    and answers of the dataset. Its token is read from `PARAPHRASE_TOKEN` of the shell that started
    the stack."""
    model: str
    """The name of the model at that server."""
    count: int = Field(default=32, ge=1, le=50)
    """How many wordings of each question to ask for. `train.wordings` says how many of them are
    trained on. The last one never is, and shows what was understood."""


class GateSettings(_Settings):
    min_learned: float = Field(default=0.9, ge=0, le=1)
    """After the training, the model must say at least this share of the changed rows. And it must
    no longer say at least this share of the deleted rows, unless it was trained anew without them.
    Rows of plain text, and rows that contradict each other, do not count."""
    min_kept: float = Field(default=0.95, ge=0, le=1)
    """Of the unchanged rows that the served release says, the new release must still say at least
    this share. The same holds for the number of held-out rows that are answered right. If there are
    fewer than 20 such rows, this is not checked."""
    min_reworded: float = Field(default=0, ge=0, le=1)
    """Of the questions that are asked in words on which no job trains, the new model must answer at
    least this share. If there are fewer than 20 such questions, this is not checked. Those about
    known rows are judged like these rows, by `min_kept`."""
    max_base_drift: float = Field(default=0.3, ge=0, le=1)
    """The base model has answered everyday prompts that are never trained on. At most this share of
    the tokens in these answers may no longer be what the new model would say."""
    golden: Path | None = None
    """A file of golden questions: rows with a question and its answer, as in a dataset. If the
    served release gives the answer, the new release must give it too. A relative path starts at the
    folder of the settings file."""
    max_loss_ratio: float = Field(default=1.02, gt=0)
    """The loss on held-out rows of plain text, and the loss on unchanged ones, may be at most this
    many times the loss of the served release."""
    max_lost_ratio: float = Field(default=0.5, ge=0, le=1)
    """A commit may delete or rewrite at most this share of the rows of the revision before. If that
    revision had fewer than 20 rows, this is not checked."""
    max_tokens: int = Field(default=16_384, ge=1)
    """The largest number of tokens that are measured in each group of rows. The groups are changed,
    unchanged, deleted and held-out rows."""


class RetrainSettings(_Settings):
    pipeline: str
    dataset: str
    """`owner/name` on a hub, or the URL of any git repository."""
    dataset_endpoint: HubEndpoint = "hub"
    """The hub that has `owner/name`: `hub` for the stack's own, or the URL of another hub."""
    ref: str = "refs/heads/main"
    base_model: str = "preset:tiny"
    """`preset:tiny`, the folder of a checkpoint, or the id of a model on a hub."""
    base_model_endpoint: HubEndpoint = HUGGING_FACE
    """The hub from which a `base_model` that is an id is fetched. `hub` is the stack's own hub."""
    releases_dir: Path
    """`<home>/releases`: holds one folder per pipeline."""
    bases_dir: Path
    """`<home>/bases`: holds the base model of each pipeline. A preset is made there once, and a
    model of a hub is fetched once."""
    keep: int = Field(default=5, ge=2)
    data: DataSettings = DataSettings()
    train: TrainSettings = TrainSettings()
    gate: GateSettings = GateSettings()
    paraphrase: ParaphraseSettings | None = None
    force_reason: str | None = None
    """If set, the release is published even if the gate refuses it. This text is recorded as the
    reason in the outcome of the job and in the release."""
    skip_if: SkipIf = "no_row_changed"
    """When the job ends as `unchanged`, without training. `no_row_changed`, for a push: if no row
    changed since the parent. `nothing_changed`, for a job by hand: if in addition the training
    settings are the same (those of a release without recorded settings count as other ones).
    `never`: if a person asked for a mode or for other settings."""
