"""Training in several processes: each takes its share of a step's blocks, gradients are added up.

Every process holds the whole model. The job starts torchrun and waits, and goes on from the
checkpoint that the first of them leaves. `python -m pipeline.retrain.processes` is one of these
processes; with a number, it is torchrun, which starts so many of them.
"""

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from jobs.launchers.process import be_nice, end_with
from pipeline.errors import PipelineError
from pipeline.retrain import job_folder
from pipeline.retrain.errors import TrainError

if TYPE_CHECKING:
    from pipeline.retrain.job import Job

logger = logging.getLogger(__name__)

ERROR = ".train-error"
"""In the job's folder: why the processes broke off, in words."""
_ATTEMPTS = 3
_STARTED_BY = "RETRAIN_STARTED_BY"
"""In the environment: the pid of the process that must not be outlived."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def add_up(tensors: list[Tensor]) -> None:
    """Replace each by its sum over all processes; a no-op in one. The same bits in each of them."""
    if not dist.is_initialized():
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat)
    for tensor, part in zip(
        tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(part.view_as(tensor))


def from_first(value: float, device: torch.device) -> float:
    """What the first process has."""
    if not dist.is_initialized():
        return value
    told = torch.tensor(value, dtype=torch.float64, device=device)
    dist.broadcast(told, src=0)
    return float(told)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """What `rank`, `world_size` and the sums are of, as torchrun's environment tells it."""
    # Whoever imports this while there is a group keeps it, with threads that the interpreter's end
    # then finds at work: an abort, now and then. Models import it.
    import torch._dynamo

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def train_in_processes(job: "Job", count: int) -> None:
    """Run the train stage of `job` in `count` processes; leaves its finished checkpoint.

    A process that was killed ends the others; all go on from the checkpoint, `_ATTEMPTS` times in
    all. Raises TrainError, with the processes' own reason where they gave one.
    """
    error = job.dir / ERROR
    error.unlink(missing_ok=True)
    threads = max(1, (job.num_threads or os.cpu_count() or 1) // count)
    environ = {
        **os.environ,
        "JOB_DIR": str(job.dir),
        "JOB_ID": job.id,
        "OMP_NUM_THREADS": str(threads),
        _STARTED_BY: str(os.getpid()),
    }
    command = [sys.executable, "-m", "pipeline.retrain.processes", str(count)]
    for attempt in range(1, _ATTEMPTS + 1):
        code = subprocess.run(command, env=environ, check=False).returncode
        if code == 0:
            return
        if error.exists():
            raise TrainError(error.read_text(encoding="utf-8"))
        logger.warning("a training process ended, attempt %d of %d", attempt, _ATTEMPTS)
    raise TrainError(
        f"one of {count} training processes ended {_ATTEMPTS} times, the last time with exit code "
        f"{code}; the job's log tells more, and `train.num_processes = 1` does without them"
    )


def main(arguments: list[str]) -> int:
    """Torchrun begins a session for each process that it starts, so that no signal to the job's
    session finds these: each ends with the one that started it instead."""
    end_with(int(os.environ[_STARTED_BY]))
    os.environ[_STARTED_BY] = str(os.getpid())
    be_nice(0)  # as the job is, in a session of its own
    if not arguments:
        return _train_here()
    from torch.distributed.run import main as torchrun

    torchrun(
        ["--standalone", f"--nproc-per-node={arguments[0]}", "-m", "pipeline.retrain.processes"]
    )
    return 0


def _train_here() -> int:
    """The train stage of the job in JOB_DIR, as one of several processes."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        return _train_in_group()


def _train_in_group() -> int:
    from pipeline.retrain.data import sort_out
    from pipeline.retrain.job import Job
    from pipeline.retrain.parent import load_parent
    from pipeline.retrain.snapshot import DatasetSnapshot
    from pipeline.retrain.start import open_start

    job = Job.from_environment(os.environ)
    try:
        snapshot = job_folder.read_record(job.dir / job_folder.SNAPSHOT, DatasetSnapshot)
        if snapshot is None:
            raise TrainError(f"{job.dir / job_folder.SNAPSHOT} is gone; submit the job again")
        parent = load_parent(job.pipeline_dir, snapshot.parent) if snapshot.parent else None
        data = sort_out(snapshot, parent, job.settings.base_model, job.settings.train)
        open_start(job, data, parent).train_here(job)
    except PipelineError as error:
        if rank() == 0:
            Path(job.dir / ERROR).write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
