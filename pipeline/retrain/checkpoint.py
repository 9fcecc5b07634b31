"""The state of a training: `Checkpoint` saves it, so that a restarted job continues instead of
starting again; and several processes may share it.

The record `checkpoint.json` names the file that holds the state. The file is complete before the
record is written.

In a group of processes, each holds the whole model, and computes a share of the blocks of each
step. The gradients of all processes are added up. A process that trains alone is a group of one.
"""

import contextlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel, ConfigDict
from torch import Tensor
from transformers import PreTrainedModel

from jobs.errors import is_temporary
from jobs.process import die_with_parent
from pipeline.retrain.errors import TemporaryError, TrainError
from pipeline.retrain.job import CHECKPOINT, read_record, write_record
from pipeline.retrain.rows import Row
from serving.weights.atomic_file import REPLACING, atomic_file

logger = logging.getLogger(__name__)

_FAILED = "failed-"
"""The beginning of the files in which the processes of a group leave the texts of their errors."""

FULL_ROUND = 3
"""The number of the last round of a delta (a training of the served weights on the changed rows).
If the gate refuses the delta's weights, this round is a full training, from the base model."""


class Checkpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    round: int = 1
    """The number of the job's round to learn its rows, from 1."""
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


State = dict[str, Any]


def weights_of(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors that training changes, by name: trainable parameters, and buffers. They share the
    memory of the model. Tied weights occur once."""
    trained = [(name, each) for name, each in model.named_parameters() if each.requires_grad]
    return {name: each.detach() for name, each in (*trained, *model.named_buffers())}


def copy_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """A copy of `weights_of` in the memory of the CPU."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights_of(model).items()}


@torch.no_grad()
def set_weights(model: PreTrainedModel, weights: dict[str, Tensor]) -> None:
    """Copy `weights` into the tensors of `model`. So tied weights stay tied."""
    for name, tensor in weights_of(model).items():
        tensor.copy_(weights[name])


def save(job_dir: Path, checkpoint: Checkpoint, state: State) -> None:
    """Write the state file, then the record that names it. Then remove the older state file. In a
    group, only the first process does this.

    Raises TrainError if one of the files cannot be written. The last checkpoint then stays valid.
    """
    if rank() > 0:
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


def load(job_dir: Path) -> tuple[Checkpoint, State] | None:
    """The last checkpoint of this job and its state. None if there is no readable checkpoint: the
    training then starts again. Raises a temporary error, such as MemoryError."""
    checkpoint = last(job_dir)
    if checkpoint is None or not (job_dir / checkpoint.file).is_file():
        return None
    path = job_dir / checkpoint.file
    try:
        state: State = torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # for damaged bytes, torch and pickle raise errors of many kinds
        if is_temporary(error):
            raise  # the next attempt of the job can read the checkpoint
        logger.warning("%s cannot be read, so this training starts again: %r", path, error)
        return None
    return checkpoint, state


def last(job_dir: Path) -> Checkpoint | None:
    """The record of the last checkpoint. None if there is none."""
    return read_record(job_dir / CHECKPOINT, Checkpoint)


def is_finished(job_dir: Path, round_number: int) -> bool:
    """Whether the training of this round is over, so that only its weights need be loaded."""
    checkpoint = last(job_dir)
    return checkpoint is not None and checkpoint.finished and checkpoint.round == round_number


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(model: PreTrainedModel, numbers: list[float]) -> list[float]:
    """Replace the gradients in each process by their sum over all processes. Returns the sums of
    `numbers`. The result is bit for bit the same in each process."""
    trained = [each for each in model.parameters() if each.requires_grad]
    sums = torch.tensor(numbers, device=model.device)
    added = [torch.zeros_like(each) if each.grad is None else each.grad for each in trained]
    flat = torch.cat([each.reshape(-1) for each in (*added, sums)])
    dist.all_reduce(flat)
    *parts, sums = torch.split(flat, [each.numel() for each in (*trained, sums)])
    for parameter, part in zip(trained, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return sums.tolist()


def from_first(value: float, device: torch.device) -> float:
    """The `value` of the first process, in every process."""
    if not dist.is_initialized():
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, src=0)
    return float(told)


@contextlib.contextmanager
def process_group(number: int, count: int, place: str) -> Iterator[None]:
    """Join the group of `count` processes as the one with this number. They meet at the URL
    `place`."""
    # Import torch._dynamo before init_process_group. Otherwise a model imports it later, and the
    # interpreter sometimes crashes at exit.
    import torch._dynamo

    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, place, rank=number, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run_group(count: int, work: Callable[[bytes], None], given: bytes) -> None:
    """Call `work(given)` in `count` processes, which form a group.

    If one process ends too early, the others are ended too. Raises TrainError if one of them did.
    If a process was killed or failed otherwise, raises TemporaryError: the next attempt of the job
    continues from the last checkpoint.
    """
    from torch.multiprocessing.spawn import ProcessException, spawn

    with tempfile.TemporaryDirectory() as folder:
        try:
            told = count, Path(folder), os.getpid(), work, given
            spawn(_member, told, count)  # type: ignore[no-untyped-call]
        except ProcessException as error:
            # The process that ended first need not be the one that failed first: the others lose
            # their connection to it.
            reason = next(Path(folder).glob(f"{_FAILED}*"), None)
            if reason is not None:
                raise TrainError(reason.read_text()) from error
            logger.error("%s", error)
            last = str(error).strip().splitlines()[-1]
            raise TemporaryError(
                f"one of {count} training processes ended too early ({last}); see the job's log"
            ) from error


def _member(
    number: int, count: int, folder: Path, job: int, work: Callable[[bytes], None], given: bytes
) -> None:
    """folder: where the processes meet, and where one leaves the text of its TrainError. job: the
    pid of the process that started the group. If it ends, this process ends too."""
    die_with_parent(job)
    if torch.cuda.is_available():
        torch.cuda.set_device(number)
    with process_group(number, count, f"file://{folder}/group"):
        try:
            work(given)
        except TrainError as error:
            (folder / f"{_FAILED}{number}").write_text(str(error))
            raise
