"""Runs the job runner: the process that takes jobs from the job store and starts them."""

import os
import signal
import threading
from contextlib import nullcontext
from functools import partial

from jobs.launcher import Launcher
from pipeline.logs import log_to_stderr
from pipeline.paths import Home, settings_file
from pipeline.runner.after_jobs import after_jobs
from pipeline.runner.attempt_variables import user_token_variable, variables_here
from pipeline.runner.by_hand import running_services
from pipeline.runner.job_store import open_job_store
from pipeline.runner.submit import head_finder
from pipeline.settings import SETTINGS_COPY, load_settings
from pipeline.stack.services import hub_service
from pipeline.tokens import load_tokens, tokens_of_hub

PRELOAD = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "huggingface_hub",
    "pipeline.retrain.run",
    "pipeline.retrain.learning",
)
"""Modules that a retraining job imports. On Linux, the runner keeps a process that has already
imported these modules, and forks each retraining from this process. This saves each retraining some
seconds."""

_KEPT_FROM_JOBS = (
    "WEBHOOK_SECRET",
    "PIPELINE_SECRET_KEY",
    "PIPELINE_SERVING__API_KEY",
    SETTINGS_COPY,
)
"""Environment variables of the runner that are not passed on to the jobs. `PIPELINE_SECRET_KEY`
decrypts the secrets of all jobs and webhooks, and makes valid tokens for any job.
`SETTINGS_COPY` makes a process read the stack's copy of the settings file; a job must not
get it, because a job may choose another settings file. Some jobs get the stack's `WEBHOOK_SECRET`
from `attempt_variables` (`pipeline/runner/attempt_variables.py`)."""


def run_jobs(home: Home, *, until_idle: bool, with_hub: bool) -> None:
    """Run the jobs of the job store until this process gets SIGTERM or SIGINT. With
    `until_idle`, also stop as soon as no job is left. With `with_hub`, also run a hub."""
    from jobs.runner import Runner

    settings = load_settings()
    log_to_stderr(settings.logs, "runner")
    has_hub, file = with_hub or SETTINGS_COPY in os.environ, home.tokens_file
    tokens = load_tokens(file) if has_hub else tokens_of_hub(file, settings.hub_url)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with (
        running_services([hub_service(settings)], home, settings) if with_hub else nullcontext(),
        open_job_store(settings, home) as store,
        after_jobs(settings, home, serves_metrics=not (with_hub or until_idle)),
    ):
        preload = PRELOAD if settings.jobs.preload is None else settings.jobs.preload
        runner = Runner(
            store,
            home.jobs_dir,
            settings.jobs.model_copy(update={"preload": preload}),
            {
                **{name: each for name, each in os.environ.items() if name not in _KEPT_FROM_JOBS},
                **user_token_variable(tokens),
                "HF_ENDPOINT": settings.hub_url,
                "DATASET_ENDPOINT": settings.hub_url,
                "PIPELINE_HOME": str(home.root),
                "PIPELINE_SETTINGS": str(settings_file()),
            },
            of_attempt=partial(variables_here, tokens=tokens),
            launchers={name: Launcher(each) for name, each in settings.launchers.items()},
            hub_url=settings.hub_url,
            find_head=head_finder(settings.hub_url, tokens),
            secret_key=tokens.key.encode(),
            alive_file=home.runner_alive,
        )
        runner.run(stop, until_idle=until_idle)
