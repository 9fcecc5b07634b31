"""Training in several processes: each takes its share of a step's blocks, gradients are added up.

Every process holds the whole model. The job starts torchrun and waits, and goes on from the
checkpoint that the first of them leaves.
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
"""In the job's folder: why the processes broke off, in words."""
_ATTEMPTS = 3
STARTED_BY = "RETRAINSTARTED_BY"
"""In the environment: the pid of the process that must not be outlived."""


def train_in_processes(job: "RetrainJob", count: int) -> None:
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
        STARTED_BY: str(os.getpid()),
    }
    command = [sys.executable, "-m", "pipeline.retrain.worker", str(count)]
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
