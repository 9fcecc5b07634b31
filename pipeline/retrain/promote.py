"""A release → the server. Leaves it pending where no server is up."""

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import httpx
from pydantic import ValidationError

from pipeline.retrain.errors import PromoteError
from pipeline.retrain.parent import chosen_release
from serving.swap_schemas import SwapRequest, SwapResult
from serving.weights.releases import clear_pending, set_pending

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 300.0
"""A swap loads, checks and probes the release before it answers."""
PATIENCE_SECONDS = 120.0
"""How long a server that defers, or goes away in the middle, is asked again."""
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
    """Ask the server to swap `release_id` in. Raises PromoteError when it will not.

    The marker comes first: a server that starts after the last attempt finds the release by it.
    Where somebody decides for another release while a server is asked again, that stands.
    """
    before = chosen_release(pipeline_dir)
    set_pending(pipeline_dir, release_id)
    if server_url is None:
        return Promotion(
            result="published", reason="no server is configured; the next one to start serves it"
        )
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            response = _ask(server_url, admin_token, release_id)
        except httpx.ConnectError:
            return Promotion(
                result="published",
                reason=f"no server at {server_url}; the next one to start serves it",
            )
        except httpx.TransportError as error:
            logger.warning("the server went away during the swap: %r", error)
            if time.monotonic() >= deadline:
                return Promotion(
                    result="published",
                    reason=f"{server_url} gave no answer ({error!r}); it serves the release at its "
                    "next start",
                )
        else:
            if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                return _read(response, pipeline_dir, release_id)
            logger.info("the server defers the swap: %s", response.text)
            if time.monotonic() >= deadline:
                raise PromoteError(
                    f"{server_url} deferred the swap to {release_id} for {patience_seconds:g} s: "
                    f"long requests hold it up; try `pipeline releases swap {release_id}` later"
                )
        time.sleep(RETRY_SECONDS)
        chosen = chosen_release(pipeline_dir)
        if chosen is not None and chosen not in (pipeline_dir / release_id, before):
            return Promotion(result="superseded", reason=f"release {chosen.name} was taken instead")


def _ask(server_url: str, admin_token: str | None, release_id: str) -> httpx.Response:
    headers = {"Authorization": f"Bearer {admin_token}"} if admin_token is not None else {}
    return httpx.post(
        f"{server_url.rstrip('/')}/admin/swap",
        json=SwapRequest(release=release_id).model_dump(),
        headers=headers,
        timeout=httpx.Timeout(10.0, read=ANSWER_SECONDS),
        trust_env=False,
    )


def _read(response: httpx.Response, pipeline_dir: Path, release_id: str) -> Promotion:
    try:
        result = SwapResult.model_validate_json(response.content)
    except ValidationError:
        raise PromoteError(
            f"{response.url} answered {response.status_code} to the swap to {release_id}: "
            f"{response.text[:300].strip() or '(nothing)'}; is it this pipeline's server, and "
            "PIPELINE_ADMIN_TOKEN its token?"
        ) from None
    if result.result == "live":
        return Promotion(result="promoted")
    if result.result == "superseded":
        clear_pending(pipeline_dir, release_id)
        return Promotion(
            result="superseded", reason=f"release {result.superseded_by} was taken instead"
        )
    raise PromoteError(
        f"the server did not take {release_id} ({result.phase}): "
        + ("; ".join(result.reasons) or f"it gave no reason; status {response.status_code}")
    )
