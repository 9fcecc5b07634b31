"""Sends requests to routes that a hotpush hub has and the Hugging Face Hub does not have."""

import os
from typing import Any

from pipeline.cli.webhook_commands import hub_access
from pipeline.errors import PipelineError


def call_hub(
    method: str,
    path: str,
    endpoint: str | None,
    query: dict[str, str],
    *,
    timeout_seconds: float | None = 30,
) -> Any:
    """Send a request to `/api/settings/<path>` of the hub; returns the JSON of the answer.

    If `endpoint` is None, the hub is the stack's own hub. Raises PipelineError if the hub cannot be
    reached, or if its answer is an error or is not JSON.
    """
    import httpx

    access = hub_access(endpoint)
    token = access["token"] or os.environ.get("HF_TOKEN")
    url = f"{access['endpoint'].rstrip('/')}/api/settings/{path}"
    try:
        answer = httpx.request(
            method,
            url,
            params=query,
            headers={"Authorization": f"Bearer {token}"} if token else {},
            timeout=timeout_seconds,
            trust_env=False,
        )
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise PipelineError(
            f"the hub at {access['endpoint']} cannot be reached ({error}); start the hub, or give "
            "another --endpoint"
        ) from None
    try:
        body = answer.json()
    except ValueError:
        body = None
    if answer.is_success and body is not None:
        return body
    reason = body.get("error") if isinstance(body, dict) else None
    if not reason and answer.status_code in (404, 405):
        reason = f"it has no route /api/settings/{path}; use a hub of this version of hotpush"
    if not reason:
        raise PipelineError(
            f"{access['endpoint']} answered {answer.status_code}, but this is not the answer of a "
            "hub; check the address. If a proxy is in front of the hub, also read the proxy's log"
        )
    raise PipelineError(f"the hub at {access['endpoint']} answered {answer.status_code}: {reason}")
