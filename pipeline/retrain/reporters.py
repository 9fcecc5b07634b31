"""Sends the losses of a training to TensorBoard, trackio or Weights & Biases.

These programs only show the values. The job itself uses `metrics.jsonl`, which has the same values.
"""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

from pipeline.retrain.errors import RetrainError

Report = Callable[[Mapping[str, float], int], None]
"""A function that takes values by name, and the number of the step that the values belong to."""

INSTALL = {
    "tensorboard": "in the folder of hotpush: pip install -e '.[tensorboard]'",
    "trackio": "pip install trackio",
    "wandb": "pip install wandb",
}


def check_reporters(names: Sequence[str]) -> None:
    """Raise RetrainError if one of the programs is not installed. Call this before the training, so
    that the job fails early."""
    for name in names:
        if find_spec(name) is None:
            raise RetrainError(
                f"`train.report_to` names {name}, which is not installed: {INSTALL[name]}, or take "
                "it out of the list"
            )


@contextmanager
def open_reporters(
    names: Sequence[str], *, folder: Path, pipeline: str, job_id: str
) -> Iterator[tuple[Report, ...]]:
    """Open the named reporters, and close them at the end. Each one stores its files in
    `folder`/<name>."""
    with ExitStack() as stack:
        yield tuple(
            stack.enter_context(OPEN[name](folder / name, pipeline, job_id)) for name in names
        )


@contextmanager
def _tensorboard(folder: Path, pipeline: str, job_id: str) -> Iterator[Report]:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:

        def report(values: Mapping[str, float], step: int) -> None:
            for name, value in values.items():
                writer.add_scalar(name, value, step)

        yield report


@contextmanager
def _trackio(folder: Path, pipeline: str, job_id: str) -> Iterator[Report]:
    # trackio reads this variable when it is imported. A value that the user has set is kept.
    os.environ.setdefault("TRACKIO_DIR", str(folder))
    import trackio

    with redirect_stdout(None):  # hide trackio's hint how to start its dashboard
        trackio.init(
            project=pipeline,
            name=job_id,
            resume="allow",  # a restarted job continues its old run
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
    yield lambda values, step: trackio.log(dict(values), step=step)
    with redirect_stdout(None):
        trackio.finish()


@contextmanager
def _wandb(folder: Path, pipeline: str, job_id: str) -> Iterator[Report]:
    folder.mkdir(exist_ok=True)
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_CACHE_DIR", str(folder))  # else, logs go to the home folder
    import wandb

    with wandb.init(
        project=pipeline,
        name=job_id,
        dir=str(folder),
        settings=wandb.Settings(silent=True),
    ) as run:
        yield lambda values, step: run.log(dict(values), step=step)


OPEN = {"tensorboard": _tensorboard, "trackio": _trackio, "wandb": _wandb}
