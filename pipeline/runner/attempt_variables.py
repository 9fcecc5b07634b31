"""The environment variables of an attempt."""

import os

from jobs.job import Job, attempt_token
from pipeline.retrain.sources import OWN_TOKEN, token_of_shell
from pipeline.tokens import Tokens


def attempt_variables(job: Job, tokens: Tokens) -> dict[str, str]:
    """The environment variables that are set for one attempt of a job.

    The hub accepts the attempt's token, which becomes invalid when the attempt ends. If a delivery
    to the stack's receiver started the job, the job also gets the secret of the stack's webhook. A
    job that a person submitted does not get this secret. A webhook may start a copy of a job
    (`pipeline webhooks create --job-id`); such a copy does not get this secret either.
    """
    variables = {"HF_TOKEN": attempt_token(job, tokens.key.encode())}
    is_copy_for_webhook = "webhook" in job.spec.labels
    if job.payload is not None and not job.by_hand and not is_copy_for_webhook:
        variables["WEBHOOK_SECRET"] = tokens.webhook
    return variables


def variables_here(job: Job, tokens: Tokens) -> dict[str, str]:
    """Those of an attempt on the machine of the stack."""
    variables = attempt_variables(job, tokens)
    # The completion server also accepts the attempt's token.
    return {**variables, "PIPELINE_ADMIN_TOKEN": variables["HF_TOKEN"]}


def user_token_variable(tokens: Tokens) -> dict[str, str]:
    """Passes the user's own token on to the jobs, which need it for other hubs."""
    token = token_of_shell(os.environ, tokens.hub)
    return {} if token is None else {OWN_TOKEN: token}
