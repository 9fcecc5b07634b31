"""The client side of `POST /admin/swap`, for a job and for the command line. Loads no engine."""

import httpx
from pydantic import ValidationError

from serving.errors import SwapAnswerError
from serving.swap_schemas import SwapRequest, SwapResult

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""The server loads, checks and probes the release before it answers."""


def request_swap(server_url: str, release: str, *, admin_token: str | None) -> SwapResult:
    """Ask the server to swap to `release`, and wait for the result.

    Raises httpx.ConnectError where no server listens, another httpx.TransportError where the
    server went away before it answered, and SwapAnswerError for an answer that is no SwapResult.
    """
    response = httpx.post(
        f"{server_url.rstrip('/')}/admin/swap",
        json=SwapRequest(release=release).model_dump(),
        headers={"Authorization": f"Bearer {admin_token}"} if admin_token is not None else {},
        timeout=httpx.Timeout(CONNECT_SECONDS, read=ANSWER_SECONDS),
        trust_env=False,
    )
    try:
        return SwapResult.model_validate_json(response.content)
    except ValidationError:
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            # Not from our server, which sends a SwapResult: from a proxy in front of it.
            return SwapResult(
                result="deferred", release=release, phase="preflight", reasons=(response.text,)
            )
        raise SwapAnswerError(str(response.url), response.status_code, response.text) from None
