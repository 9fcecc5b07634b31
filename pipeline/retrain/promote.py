"""Asks the server to swap to a release. If no server runs, the release stays marked as pending, and
the next server that starts takes it."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from pipeline.retrain.errors import PromoteError, SwapDeferred, SwapFailed
from serving.errors import SwapAnswerError
from serving.swap_schemas import SwapResult, request_swap
from serving.weights.release_store import (
    clear_pending,
    live_releases,
    pending_release,
    set_pending,
)

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0
"""How long to keep asking if the server defers the swap, or if the connection breaks before it
answers."""
RETRY_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True)
class Promotion:
    result: Literal["promoted", "published", "superseded"]
    reason: str | None = None


def promote(
    pipeline_dir: Path,
    release_id: str,
    *,
    server_url: str | None,
    admin_token: str | None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Promotion:
    """Ask the server to swap to `release_id`. Raises PromoteError if the server refuses,
    SwapDeferred if the server still defers the swap after `patience_seconds`, and SwapFailed if the
    server's engine or disk fails.

    First the release is marked as pending. So a server that starts later finds it. If somebody
    chooses another release between two attempts, this function stops asking, and the other release
    stays chosen.
    """
    before = _chosen(pipeline_dir)
    earlier = set_pending(pipeline_dir, release_id)
    if server_url is None:
        return Promotion(
            result="published", reason="no server is configured; the next server to start serves it"
        )
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            result = request_swap(server_url, release_id, admin_token=admin_token)
        except httpx.ConnectError:
            return Promotion(
                result="published",
                reason=f"no server at {server_url}; the next server to start serves it",
            )
        except httpx.TransportError as error:
            logger.warning("the connection broke during the swap: %r", error)
            if time.monotonic() >= deadline:
                return Promotion(
                    result="published",
                    reason=f"{server_url} gave no answer ({error!r}); it serves the release at its "
                    "next start",
                )
        except SwapAnswerError as error:
            # The job fails, so no later start of a server may serve its release.
            clear_pending(pipeline_dir, release_id, earlier=earlier)
            raise PromoteError(
                f"{error}; is it this pipeline's server, and PIPELINE_ADMIN_TOKEN its token?"
            ) from None
        else:
            if result.result != "deferred":
                return _promotion(result, pipeline_dir, release_id)
            logger.info("the server defers the swap: %s", "; ".join(result.reasons))
            if time.monotonic() >= deadline:
                raise SwapDeferred(
                    f"{server_url} deferred the swap to {release_id} for {patience_seconds:g} s: "
                    f"long requests hold it up; try `pipeline releases swap {release_id}` later"
                )
        time.sleep(RETRY_SECONDS)
        chosen = _chosen(pipeline_dir)
        if chosen is not None and chosen not in (release_id, before):
            return Promotion(result="superseded", reason=f"release {chosen} was taken instead")


def _chosen(pipeline_dir: Path) -> str | None:
    """The id of the release that was asked for last. (If this release is damaged, the server serves
    an older one in its place, but nobody has chosen the older one.)"""
    return pending_release(pipeline_dir) or next(reversed(live_releases(pipeline_dir)), None)


def _promotion(result: SwapResult, pipeline_dir: Path, release_id: str) -> Promotion:
    if result.result == "live":
        return Promotion(result="promoted")
    if result.result == "superseded":
        clear_pending(pipeline_dir, release_id)
        return Promotion(
            result="superseded", reason=f"release {result.superseded_by} was taken instead"
        )
    error = SwapFailed if result.result == "failed" else PromoteError
    raise error(
        f"the server did not take {release_id} ({result.phase}): "
        + ("; ".join(result.reasons) or f"{result.result}, and it gave no reason")
    )
