"""`Checkpoint`: where training stands, so that a killed job goes on instead of starting again.

`checkpoint.json` names the file that holds the state; the file is whole before the record names it.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from pipeline.retrain import job_folder
from pipeline.retrain.errors import TrainError
from serving.weights.atomic_file import REPLACING, atomic_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Checkpoint(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")  # a job of an earlier release goes on

    job_id: str
    attempt: int = 1
    """Of the job to learn its rows."""
    step: int
    """Updates of the weights so far."""
    tokens: int
    """Trained on so far, without padding."""
    not_trained: tuple[int, ...] = ()
    """Rows that no step has seen yet, as indices into what the plan learns."""
    file: str
    """Relative to the job's folder. Weights, optimizer and random state; once finished, the best
    weights only."""
    trained_share: float = 1.0
    """Of the best weights in those that were kept; the rest is what the training started from."""
    finished: bool = False


State = dict[str, Any]


def weights_of(model: "PreTrainedModel") -> dict[str, Tensor]:
    """What training changes, by name, tied ones once, still sharing the model's storage: trainable
    parameters, and buffers."""
    seen: set[int] = set()
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        is_frozen = isinstance(tensor, torch.nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and not is_frozen:
            seen.add(id(tensor))
            found[name] = tensor.detach()
    return found


def copy_weights(model: "PreTrainedModel") -> dict[str, Tensor]:
    """In the memory of the host, beside what the device holds."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in weights_of(model).items()}


@torch.no_grad()
def set_weights(model: "PreTrainedModel", weights: dict[str, Tensor]) -> None:
    """Copy `weights` in place, so that tied names stay tied."""
    own = weights_of(model)
    if own.keys() != weights.keys():
        raise ValueError(f"these are other weights: {sorted(own.keys() ^ weights.keys())}")
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def save(job_dir: Path, checkpoint: Checkpoint, state: State) -> None:
    """Write the state, then the record that names it, then drop what the record named before.

    Raises TrainError where the disk takes no more; the last checkpoint is still there then.
    """
    path = job_dir / checkpoint.file
    path.parent.mkdir(exist_ok=True)
    # A job that was killed while it saved leaves half a file, as large as the weights.
    for abandoned in path.parent.glob(f"{REPLACING}*"):
        abandoned.unlink()
    try:
        with atomic_file(path) as file:
            torch.save(state, file)
    except (OSError, RuntimeError) as error:
        raise TrainError(
            f"the checkpoint {path} could not be written ({error}); is there space on its disk?"
        ) from error
    job_folder.write_record(job_dir / job_folder.CHECKPOINT, checkpoint)
    for other in path.parent.iterdir():
        if other != path:
            other.unlink()


def load(job_dir: Path) -> tuple[Checkpoint, State] | None:
    """The last checkpoint of this job; None where there is none that can be read."""
    checkpoint = job_folder.read_record(job_dir / job_folder.CHECKPOINT, Checkpoint)
    if checkpoint is None or not (job_dir / checkpoint.file).is_file():
        return None
    state: State = torch.load(job_dir / checkpoint.file, weights_only=True, map_location="cpu")
    return checkpoint, state


def is_finished(job_dir: Path, attempt: int) -> bool:
    """Whether this attempt's training is over, and only its weights are to be loaded."""
    checkpoint = job_folder.read_record(job_dir / job_folder.CHECKPOINT, Checkpoint)
    return checkpoint is not None and checkpoint.finished and checkpoint.attempt == attempt
