"""`python -m pipeline.retrain.worker`: one of several processes that train together. With a number
as its argument, the command starts this many of these processes with torchrun. The environment
variable `JOB_DIR` names the folder of the job."""

import logging
import os
import sys

import torch

from jobs.launchers.process import die_with_parent, lower_priority
from pipeline.errors import PipelineError
from pipeline.retrain import job_folder
from pipeline.retrain.data import compare_revisions
from pipeline.retrain.errors import TrainError
from pipeline.retrain.evaluate import Evaluation
from pipeline.retrain.group import process_group, rank
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.learning import Learning
from pipeline.retrain.parent import load_parent
from pipeline.retrain.processes import ERROR, STARTED_BY
from pipeline.retrain.snapshot import DatasetSnapshot


def main(arguments: list[str]) -> int:
    """Train, or start the processes that train.

    Torchrun starts each process in a new session, so a signal to the job's session does not reach
    the process. Therefore each process ends itself when the process that started it ends.
    """
    die_with_parent(int(os.environ[STARTED_BY]))
    os.environ[STARTED_BY] = str(os.getpid())
    lower_priority(0)  # give the new session the low priority that the process has inherited
    if not arguments:
        return _train_here()
    from torch.distributed.run import main as torchrun

    torchrun(["--standalone", f"--nproc-per-node={arguments[0]}", "-m", "pipeline.retrain.worker"])
    return 0


def _train_here() -> int:
    """Run the train stage of the job in JOB_DIR, as one of several processes."""
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with process_group():
        return _train_in_group()


def _train_in_group() -> int:
    job = RetrainJob.from_environment(os.environ)
    try:
        snapshot = job_folder.read_record(job.dir / job_folder.SNAPSHOT, DatasetSnapshot)
        if snapshot is None:
            raise TrainError(f"{job.dir / job_folder.SNAPSHOT} is gone; submit the job again")
        parent = load_parent(job.pipeline_dir, snapshot.parent) if snapshot.parent else None
        data = compare_revisions(snapshot, parent, job.settings)
        done = job_folder.read_record(job.dir / job_folder.EVALUATION, Evaluation)
        Learning.begin(job, data, parent).train_in_group(done)
    except PipelineError as error:
        if rank() == 0:
            (job.dir / ERROR).write_text(str(error), encoding="utf-8")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
