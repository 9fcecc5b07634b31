"""Asks the server to swap to a release. If no server runs, the release stays marked as pending, and
the next server that starts takes it."""

import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx

from pipeline.retrain.errors import PromoteError, SwapDeferred
from serving.errors import SwapAnswerError
from serving.swap_schemas import SwapResult, request_swap
from serving.weights.release_store import chosen_release_id, clear_pending, set_pending

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
    instead_of: Collection[str | None],
    server_url: str | None,
    admin_token: str | None,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Promotion:
    """Choose the release, and ask the server to swap to it. Raises PromoteError if the server
    refuses, and SwapDeferred if the server still defers the swap after `patience_seconds`, or its
    engine or disk fails.

    instead_of: the releases of which one must be the chosen release (None: no release): the one
    that this release was trained from, and this release itself, if an earlier attempt of the job
    has chosen it. Raises Superseded if somebody has chosen another one while the job trained. If
    somebody does so after this release was chosen, the other one stays chosen.

    First the release is marked as pending. So a server that starts later finds it.
    """
    earlier = set_pending(pipeline_dir, release_id, instead_of=instead_of)
    if server_url is None:
        return _published("no server is configured")
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            result = request_swap(
                server_url, release_id, admin_token=admin_token, instead_of=instead_of
            )
        except httpx.ConnectError:
            return _published(f"no server at {server_url}")
        except httpx.TransportError as error:
            logger.warning("the connection broke during the swap: %r", error)
            if time.monotonic() >= deadline:
                return _published(f"{server_url} gave no answer ({error!r})")
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
        if (chosen := chosen_release_id(pipeline_dir)) not in instead_of:
            return Promotion(result="superseded", reason=f"release {chosen} was taken instead")


def _published(why: str) -> Promotion:
    return Promotion(result="published", reason=f"{why}; the next server to start serves it")


def _promotion(result: SwapResult, pipeline_dir: Path, release_id: str) -> Promotion:
    if result.result == "live":
        return Promotion(result="promoted")
    if result.result == "superseded":
        clear_pending(pipeline_dir, release_id)
        return Promotion(
            result="superseded", reason=f"release {result.superseded_by} was taken instead"
        )
    error = SwapDeferred if result.result == "failed" else PromoteError
    raise error(
        f"the server did not take {release_id} ({result.phase}): "
        + ("; ".join(result.reasons) or f"{result.result}, and it gave no reason")
    )
