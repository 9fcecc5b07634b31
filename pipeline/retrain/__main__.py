"""`python -m pipeline.retrain`: the command of a retraining job. It writes `outcome.json`, even if
the job fails.

Environment variables describe the job: `JOB_DIR` (the folder with `spec.json`), `JOB_ID`,
`HF_ENDPOINT` and `HF_TOKEN` (the hub), and `PIPELINE_SERVER_URL` and `PIPELINE_ADMIN_TOKEN` (the
server).
"""

import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from jobs.folder import OUTCOME
from jobs.outcome import JobOutcome
from jobs.temporary_failures import TEMPORARY_FAILURE, is_temporary
from pipeline.errors import PipelineError
from pipeline.retrain import job_folder
from pipeline.retrain.errors import TemporaryError
from pipeline.retrain.job import RetrainJob
from pipeline.retrain.run import retrain
from serving.errors import NotEnoughSpace, ServingError

logger = logging.getLogger("pipeline.retrain")


def main(
    environ: Mapping[str, str] = os.environ,
    job_of: Callable[[Mapping[str, str]], RetrainJob] = RetrainJob.from_environment,
) -> int:
    """Run the job that `environ` describes. Returns the exit code: 0 unless the job failed."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    for client in ("httpx", "httpx2"):  # they log each request
        logging.getLogger(client).setLevel(logging.WARNING)
    job: RetrainJob | None = None
    try:
        job = job_of(environ)
        outcome = retrain(job)
    except Exception as error:
        if isinstance(error, PipelineError | ServingError):
            logger.error("%s", error)
            reason = " ".join(str(error).split())
        else:
            logger.exception("the job failed with an unexpected error")
            said = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            reason = f"{said} (unexpected; the job's log has the traceback)"
        failed = JobOutcome(result="failed", exit_code=1, job_id=environ.get("JOB_ID"))
        outcome = (failed if job is None else job.outcome("failed")).model_copy(
            update={
                "reason": reason,
                "may_pass": isinstance(error, TemporaryError | NotEnoughSpace)
                or is_temporary(error),
            }
        )
    logger.info("%s %s", outcome.result, outcome.reason or "")
    if "JOB_DIR" in environ:
        try:
            job_folder.write_record(Path(environ["JOB_DIR"]) / OUTCOME, outcome)
        except OSError as error:
            if not is_temporary(error):
                raise
            logger.error("the outcome cannot be written: %s", error)
            return TEMPORARY_FAILURE
    return outcome.exit_code or 0


if __name__ == "__main__":
    sys.exit(main())
