"""Trains in several processes. Each process computes a share of the blocks of each step, and the
gradients of all processes are added up.

Every process holds the whole model. The job starts the processes with torchrun and waits for them.
The first process writes a checkpoint, from which the job continues.
"""

import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from pipeline.retrain.errors import TrainError

if TYPE_CHECKING:
    from pipeline.retrain.job import RetrainJob

logger = logging.getLogger(__name__)

ERROR = ".train-error"
"""A file in the job's folder: the message of the error that stopped the processes."""
_ATTEMPTS = 3
STARTED_BY = "RETRAIN_STARTED_BY"
"""An environment variable for the processes: the pid of the process that started them. When that
process ends, they end too."""


def train_in_processes(job: "RetrainJob", count: int) -> None:
    """Run the train stage of `job` in `count` processes. They leave a finished checkpoint.

    If one process is killed, the others end too. Then all are started again, and continue from the
    last checkpoint, up to `_ATTEMPTS` starts in all. Raises TrainError, with the reason that the
    processes have written into the file ERROR, if any.
    """
    error = job.dir / ERROR
    error.unlink(missing_ok=True)
    threads = max(1, (job.num_threads or os.cpu_count() or 1) // count)
    environ = {
        **os.environ,
        "JOB_DIR": str(job.dir),
        "JOB_ID": job.id,
        "OMP_NUM_THREADS": str(threads),
        STARTED_BY: str(os.getpid()),
    }
    command = [sys.executable, "-m", "pipeline.retrain.worker", str(count)]
    for attempt in range(1, _ATTEMPTS + 1):
        code = subprocess.run(command, env=environ, check=False).returncode
        if code == 0:
            return
        if error.exists():
            raise TrainError(error.read_text(encoding="utf-8"))
        logger.warning("a training process ended too early, attempt %d of %d", attempt, _ATTEMPTS)
    raise TrainError(
        f"one of {count} training processes ended {_ATTEMPTS} times, the last time with exit code "
        f"{code}; see the job's log, or set `train.num_processes = 1` to train without them"
    )
