"""The variables of an attempt on another machine, and what the hub does with its release."""

import logging
import os
from collections.abc import Callable
from pathlib import Path

from jobs.errors import is_temporary
from jobs.job import Job
from jobs.outcome import JobOutcome
from pipeline.errors import PipelineError
from pipeline.hub.errors import DiskFull
from pipeline.hub.service import Elsewhere
from pipeline.paths import Home
from pipeline.retrain.elsewhere import CHOSEN, RELEASES
from pipeline.retrain.errors import TemporaryError
from pipeline.retrain.job import PARAPHRASE_TOKEN, damaged_releases, find_parent
from pipeline.retrain.run import promote
from pipeline.runner.attempt_variables import attempt_variables, user_token_variable
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import Tokens
from serving.errors import NotEnoughSpace, ServingError, Superseded
from serving.weights.release_store import load_release, pending_release, prune

logger = logging.getLogger(__name__)

_PASSED_ON = (PARAPHRASE_TOKEN,)
"""Variables of the shell that started the stack which a job elsewhere gets too."""


def jobs_elsewhere(settings: Settings, home: Home, tokens: Tokens) -> Elsewhere:
    def variables_of(job: Job) -> dict[str, str]:
        passed_on = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
        variables = {**passed_on, **user_token_variable(tokens), **attempt_variables(job, tokens)}
        if job.spec.pipeline is None:
            return variables
        pipeline_dir = home.releases_dir / job.spec.pipeline
        parent = find_parent(pipeline_dir, damaged_releases(pipeline_dir))
        return {
            **variables,
            RELEASES: f"{settings.hub.owner}/{job.spec.pipeline}",
            **({} if parent is None else {CHOSEN: parent.id}),
        }

    def take(job: Job, outcome: JobOutcome, upload: Callable[[str], Path]) -> JobOutcome:
        try:
            pipeline = settings.pipeline(job.spec.pipeline)
            if outcome.result == "published":
                folder = upload(pipeline.name)
            elif pending := pending_release(home.releases_dir / pipeline.name):
                # Of an attempt before, after which the server deferred the swap for too long.
                folder = home.releases_dir / pipeline.name / pending
            else:
                return outcome
            return _promoted(outcome, folder, pipeline, settings.server_url(pipeline), tokens.admin)
        except Superseded as moved:
            # The next attempt trains from the release that was chosen meanwhile.
            return _failed(outcome, str(moved), may_pass=True)
        except (PipelineError, ServingError, OSError) as error:
            may_pass = isinstance(error, TemporaryError | NotEnoughSpace | DiskFull)
            may_pass = may_pass or is_temporary(error)
            return _failed(outcome, " ".join(str(error).split()), may_pass=may_pass)

    return Elsewhere(settings=settings.jobs, variables_of=variables_of, take=take)


def _promoted(
    outcome: JobOutcome, folder: Path, pipeline: PipelineSettings, server_url: str, token: str
) -> JobOutcome:
    parent = load_release(folder).lineage.parent
    result, reason = promote(
        folder.parent,
        folder.name,
        instead_of=(parent, folder.name, *damaged_releases(folder.parent)),
        server_url=server_url,
        token=token,
    )
    try:
        prune(folder.parent, pipeline.keep)
    except (ServingError, OSError):
        logger.exception("not every old release of %s could be removed", pipeline.name)
    reasons = "; ".join(filter(None, (reason, outcome.reason)))
    ending = {"result": result, "release": folder.name, "reason": reasons or None}
    return outcome.model_copy(update=ending)


def _failed(outcome: JobOutcome, reason: str, *, may_pass: bool) -> JobOutcome:
    ending = {"result": "failed", "stage": "promote", "release": None, "exit_code": None}
    return outcome.model_copy(update={**ending, "reason": reason, "may_pass": may_pass})
