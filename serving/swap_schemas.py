"""The request body and the answer of `POST /admin/swap`."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SwapRequest(_Record):
    release: str
    """The id of a release of the pipeline, or the path of its folder. A relative path is relative
    to the folder of the pipeline's releases."""


SwapPhase = Literal["preflight", "stage", "barrier", "commit", "probe", "live"]


class SwapResult(_Record):
    """How a swap ended.

    The HTTP status depends on `result`: `live` 200; `refused` 422 (the release failed the
    preflight, the staging or the probe); `superseded` 409 (a newer swap was requested); `deferred`
    503 (earlier requests did not end in time); `failed` 500 (the engine or the disk failed). After
    every result except `live`, the server still serves the release that it served before.
    """

    result: Literal["live", "refused", "superseded", "deferred", "failed"]
    release: str
    previous: str | None = None
    """The id of the release that was live before the swap; None if there was none. If the result is
    not `live`, this release is still live."""
    phase: SwapPhase
    """The last phase that the swap reached."""
    reasons: tuple[str, ...] = ()
    """Why the swap did not succeed. If a file or a tensor is wrong, the reason names it."""
    superseded_by: str | None = None
    """The id of the release of the newer swap, if the result is `superseded`."""
    seconds: dict[str, float] = {}
    """Phase → the time that the swap spent in it, in seconds."""
    probe_max_difference: float | None = None
    """The largest absolute difference between a logprob of the engine and the logprob of the job in
    the release's probe; None if no probe was compared."""
