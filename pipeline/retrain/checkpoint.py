"""The state of a training: `Checkpoint` saves it, so that a restarted job continues instead of
starting again.

The record `checkpoint.json` names the file that holds the state. The file is complete before the
record is written.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedModel

from pipeline.retrain import checkpoint_store
from pipeline.retrain.data import Mode
from pipeline.retrain.errors import TrainError
from pipeline.retrain.job import CHECKPOINT, read_record, write_record
from pipeline.retrain.processes import gathered
from pipeline.retrain.rows import Row
from serving.weights.atomic_file import REPLACING, atomic_file


class Checkpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    mode: Mode
    """Of the training. A job whose delta the gate refuses has a full training after it."""
    step: int
    """Updates of the weights so far."""
    tokens: int
    """Tokens trained on so far, without padding."""
    not_trained: tuple[int, ...] = ()
    """Rows that no step has visited yet, as indices of the rows to learn."""
    not_learned: tuple[int, ...] = ()
    """Other rows with an answer that was wrong in the last visit, as indices of the rows to
    learn."""
    file: str
    """The path of the state file, relative to the job's folder. The file holds the weights, the
    optimizer and the random state. After the end of the training, it holds only the best
    weights."""
    finished: bool = False

    def waiting(self, rows: Sequence[Row]) -> set[str]:
        """The digests of those of `rows`, the rows to learn, that were not visited, or were wrong
        in their last visit. If a row has copies, this must be true for all of them."""
        places = {*self.not_trained, *self.not_learned}
        done = {row.digest for place, row in enumerate(rows) if place not in places}
        return {rows[place].digest for place in places} - done


@dataclass(kw_only=True)
class TrainingState:
    """The course of a training so far: what it has visited, and what is due."""

    step: int = 0
    tokens: int = 0
    number: int = 0
    """The number of the current pass, from 0."""
    visits: list[int] = field(default_factory=list)
    """The sequences that this pass visits, in order."""
    place: int = 0
    """How many steps of this pass are done."""
    streak: list[int] = field(default_factory=list)
    """For each sequence, how often its answer was right since it was last wrong."""
    due: list[int] = field(default_factory=list)
    """For each sequence, the next pass that visits it. 0 if it was never visited."""
    lost: list[int] = field(default_factory=list)
    """Sequences that a measurement found wrong. They are learned again."""
    replayed: int = 0
    """How many sequences of unchanged rows were visited so far."""
    anchored: int = 0
    """How many anchors (answers of the base model) were visited so far."""
    unlearned: int = 0
    """How many deleted rows were visited so far."""
    warm_up_from: int = 0
    """The step at which the learning rate begins to rise."""
    cool_down_from: int | None = None
    """The step at which the learning rate begins to fall. None if it is not decided yet."""
    evaluated_at: int = 0
    """The last measurement was made after this many tokens."""
    best: float | None = None
    """The best result of a measurement: the lowest held-out loss, or the lowest number of wrong
    rows."""
    stale: int = 0
    """How many measurements were made since the best one."""

    @property
    def is_relearning(self) -> bool:
        """Whether a measurement has found wrong rows, which are now learned again. Only for rows
        with an answer."""
        return self.best is not None and self.best > 0


State = dict[str, Any]


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that training changes, by name: trainable parameters, and buffers. They share the
    memory of the model. Tied weights occur once."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return {name: each.detach() for name, each in (*trained, *model.named_buffers())}


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of `weights_of` in the memory of the CPU, as `gathered`."""
    return {
        name: tensor.to("cpu", copy=True) for name, tensor in gathered(weights_of(model)).items()
    }


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy `weights` into the tensors of `model`. So tied weights stay tied."""
    for name, tensor in weights_of(model).items():
        tensor.copy_(weights[name])


def save(job_dir: Path | None, checkpoint: Checkpoint, state: State) -> None:
    """Write the state file, then the record that names it. Then remove the older state file, and
    put a copy of both into the store, if the job has one.

    job_dir: None in a process that only helps another one, and saves nothing. Raises TrainError if
    one of the files cannot be written. The last checkpoint then stays valid.
    """
    if job_dir is None:
        return
    path = job_dir / checkpoint.file
    path.parent.mkdir(exist_ok=True)
    # If the job was killed while it saved, an incomplete file is left, which may be as large as the
    # weights.
    for abandoned in path.parent.glob(f"{REPLACING}*"):
        abandoned.unlink()
    try:
        with atomic_file(path) as file:
            torch.save(state, file)
        write_record(job_dir / CHECKPOINT, checkpoint)
    except (OSError, RuntimeError) as error:
        raise TrainError(
            f"the checkpoint {path} could not be written ({error}); is there space on its disk?"
        ) from error
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()
    checkpoint_store.put(job_dir, path)


def load(job_dir: Path) -> tuple[Checkpoint, State] | None:
    """The last checkpoint of this job and its state. None if there is none."""
    checkpoint = last(job_dir)
    if checkpoint is None or not (job_dir / checkpoint.file).is_file():
        return None
    return checkpoint, torch.load(job_dir / checkpoint.file, weights_only=True, map_location="cpu")


def last(job_dir: Path) -> Checkpoint | None:
    """The record of the last checkpoint. None if there is none."""
    return read_record(job_dir / CHECKPOINT, Checkpoint)
