"""The request body and the answer of `POST /admin/swap`, and the client of this route for jobs and
for the command line. Imports no engine."""

from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from serving.errors import SwapAnswerError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 600.0
"""The server answers only after the swap: it first loads, checks and probes the release."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SwapRequest(_Record):
    release: str
    """The id of a release of the pipeline."""
    instead_of: tuple[str | None, ...] | None = None
    """Swap only if the release that was chosen last is one of these (None: no release); otherwise
    the result is `superseded`. A job names the release that its weights were trained from."""


SwapPhase = Literal["preflight", "stage", "barrier", "commit", "probe", "live"]
SwapResultName = Literal["live", "refused", "superseded", "deferred", "failed"]


class SwapResult(_Record):
    """How a swap ended.

    The HTTP status depends on `result`: `live` 200; `refused` 422 (the release failed the
    preflight, the staging or the probe); `superseded` 409 (a newer swap was requested, or another
    release was chosen); `deferred` 503 (earlier requests did not end in time); `failed` 500 (the
    engine or the disk failed). After every result except `live`, the server still serves the
    release that it served before, unless an engine that holds one release has failed in `commit`.
    """

    result: SwapResultName
    release: str
    previous: str | None = None
    """The id of the release that was live before the swap; None if there was none. If the result is
    not `live`, this release is still live."""
    phase: SwapPhase
    """The last phase that the swap reached."""
    reasons: tuple[str, ...] = ()
    """Why the swap did not succeed. If a file or a tensor is wrong, the reason names it."""
    superseded_by: str | None = None
    """The id of the release of the newer swap, or of the release that was chosen, if the result is
    `superseded`."""
    seconds: dict[str, float] = {}
    """Phase → the time that the swap spent in it, in seconds."""


def request_swap(
    server_url: str,
    release: str,
    *,
    token: str | None,
    instead_of: Collection[str | None] | None = None,
) -> SwapResult:
    """Ask the server to swap to `release`, and wait for the result. See `SwapRequest` for
    `instead_of`. token: the admin token, or that of a running job.

    An answer 503 that is not a `SwapResult` counts as `deferred`. Any other answer that is not a
    `SwapResult` raises SwapAnswerError. Raises httpx.ConnectError if no server listens, and another
    httpx.TransportError if the server gives no answer.
    """
    # The server imports this module too, and sends no requests.
    import httpx

    response = httpx.post(
        f"{server_url.rstrip('/')}/admin/swap",
        json={"release": release, "instead_of": instead_of and list(instead_of)},
        headers={"Authorization": f"Bearer {token}"} if token is not None else {},
        timeout=httpx.Timeout(CONNECT_SECONDS, read=ANSWER_SECONDS),
        trust_env=False,
    )
    try:
        return SwapResult.model_validate_json(response.content)
    except ValidationError:
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            # This answer is from a proxy in front of the server, or the server was stopped before
            # the swap had ended.
            return SwapResult(
                result="deferred", release=release, phase="preflight", reasons=(response.text,)
            )
        said = response.text[:300].strip() or "(nothing)"
        raise SwapAnswerError(f"{response.url} answered {response.status_code}: {said}") from None
