"""The state of a training: `Checkpoint` saves it, so that a restarted job continues instead of
starting again.

The record `checkpoint.json` names the folder that holds the state, with a file of each process. The
folder is complete before the record is written.
"""

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as read_parts
from torch.distributed.checkpoint.state_dict_saver import save as write_parts
from transformers import PreTrainedModel

from pipeline.retrain import checkpoint_store
from pipeline.retrain.data import Mode
from pipeline.retrain.errors import CheckpointUnreadable, TrainError
from pipeline.retrain.job import CHECKPOINT, read_record, write_record
from pipeline.retrain.processes import num_processes
from pipeline.retrain.rows import Row
from serving.errors import first_line

logger = logging.getLogger("pipeline.retrain")


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


class Checkpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

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
    name: str
    """Of the folder with the state: the weights, the optimizer and the random state. After the end
    of the training, only the best weights."""
    progress: TrainingState | None = None
    """None after the end of the training."""
    finished: bool = False

    def waiting(self, rows: Sequence[Row]) -> set[str]:
        """The digests of those of `rows`, the rows to learn, that were not visited, or were wrong
        in their last visit. If a row has copies, this must be true for all of them."""
        # The places behind `rows` are of deleted rows.
        places = {each for each in (*self.not_trained, *self.not_learned) if each < len(rows)}
        done = {row.digest for place, row in enumerate(rows) if place not in places}
        return {rows[place].digest for place in places} - done


State = dict[str, Any]


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that training changes, by name: trainable parameters, and buffers. They share the
    memory of the model. Tied weights occur once."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return {name: each.detach() for name, each in (*trained, *model.named_buffers())}


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of `weights_of`, or of the parts of them that this process has."""
    return {name: tensor.clone() for name, tensor in weights_of(model).items()}


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy `weights` into the tensors of `model`. So tied weights stay tied."""
    for name, tensor in weights_of(model).items():
        tensor.copy_(weights[name])


def save(place: str, job_dir: Path | None, checkpoint: Checkpoint, state: State) -> None:
    """Write `state`, of which each process writes its own part, then the record that names it. Then
    remove the older checkpoints.

    place: of all checkpoints of the job. All processes reach it. job_dir: None in a process that
    only helps another one. If an error of the disk or of the store prevents it, the last checkpoint
    stays valid, and this is told. Raises TrainError if this is the end of a training of several
    processes: none of them has all of the weights.
    """
    try:
        with _without_warnings():
            writer = FsspecWriter(f"{place}/{checkpoint.name}", use_listings_cache=False)
            write_parts(state, storage_writer=writer)
        if job_dir is not None:
            write_record(job_dir / CHECKPOINT, checkpoint)
            checkpoint_store.keep_only(job_dir, checkpoint.name)
    except (CheckpointException, OSError, ImportError, ValueError) as error:
        cause = _cause(error)
        told = (
            f"the checkpoint {place}/{checkpoint.name} could not be written ({first_line(cause)})"
        )
        if checkpoint.finished and num_processes() > 1:
            raise TrainError(f"{told}; is there space, and do all processes reach it?") from cause
        logger.error("%s; the training goes on", told)


def load(place: str, checkpoint: Checkpoint, state: State, *, is_alone: bool = False) -> None:
    """Read `state` from a checkpoint, into its tensors. Each process reads the parts that it has;
    one that `is_alone`, everything. Raises CheckpointUnreadable."""
    try:
        with _without_warnings():
            reader = FsspecReader(f"{place}/{checkpoint.name}", use_listings_cache=False)
            read_parts(state, storage_reader=reader, no_dist=is_alone)
    except (CheckpointException, OSError, ImportError, ValueError) as error:
        raise CheckpointUnreadable(
            f"the checkpoint {place}/{checkpoint.name} cannot be read ({first_line(_cause(error))})"
        ) from error


def _cause(error: BaseException) -> BaseException:
    """What went wrong, in the first process in which something did."""
    return (
        next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
    )


@contextmanager
def _without_warnings() -> Iterator[None]:
    """torch warns in each call of a process that is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def last(job_dir: Path) -> Checkpoint | None:
    """The record of the last checkpoint. None if there is none."""
    return read_record(job_dir / CHECKPOINT, Checkpoint)
