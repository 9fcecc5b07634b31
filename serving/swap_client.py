"""Sends `POST /admin/swap` to a server, for jobs and for the command line. Imports no engine."""

import httpx
from pydantic import ValidationError

from serving.errors import SwapAnswerError
from serving.swap_schemas import SwapRequest, SwapResult

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""The server answers only after the swap: it first loads, checks and probes the release."""


def request_swap(server_url: str, release: str, *, admin_token: str | None) -> SwapResult:
    """Ask the server to swap to `release`, and wait for the result.

    An answer 503 that is not a `SwapResult` counts as `deferred`. Any other answer that is not a
    `SwapResult` raises SwapAnswerError. Raises httpx.ConnectError if no server listens, and another
    httpx.TransportError if the server gives no answer.
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
            # Our server sends a SwapResult with its 503. So this answer is from a proxy in front of
            # the server.
            return SwapResult(
                result="deferred", release=release, phase="preflight", reasons=(response.text,)
            )
        raise SwapAnswerError(str(response.url), response.status_code, response.text) from None
