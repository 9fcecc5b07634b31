"""`SwapRequest` and `SwapResult`: what `POST /admin/swap` takes and answers."""

from typing import Literal

from pydantic import BaseModel, ConfigDict


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SwapRequest(_Record):
    release: str
    """A release id, or the path of a release folder under the releases root."""


SwapPhase = Literal["preflight", "stage", "barrier", "commit", "probe", "live"]


class SwapResult(_Record):
    """What became of a swap.

    `live` is HTTP 200; `refused` 422 (the release is not fit: preflight, staging or the probe says
    so); `superseded` 409; `deferred` 503; `failed` 500 (the engine or the disk is in trouble). In
    all but the first the release that was served before is still served.
    """

    result: Literal["live", "refused", "superseded", "deferred", "failed"]
    release: str
    previous: str | None = None
    """What was served before; None for a server's first release."""
    phase: SwapPhase
    """The last phase that was reached."""
    reasons: tuple[str, ...] = ()
    """Everything that speaks against it, each naming file and tensor where there is one."""
    superseded_by: str | None = None
    seconds: dict[str, float] = {}
    """Time spent per phase."""
    probe_max_difference: float | None = None
    """Largest absolute difference between a probe logprob recorded by the job and the engine's."""
