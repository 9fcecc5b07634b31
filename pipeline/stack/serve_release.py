"""Makes the server of a pipeline serve another release, as a person wants it."""

import logging
from pathlib import Path

import httpx

from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import load_tokens
from serving.errors import ReleaseError, SwapAnswerError
from serving.swap_schemas import SwapResult, request_swap
from serving.weights.release_store import (
    clear_pending,
    list_releases,
    load_release,
    release_number,
    served_or_empty,
    served_release,
    set_pending,
)

logger = logging.getLogger(__name__)


def swap_in(
    home: Home, settings: Settings, pipeline: PipelineSettings, release: str
) -> SwapResult | None:
    """Ask the server to serve the release. Returns how this ended, perhaps not as `live`. None if
    no server is up: the next server that starts will then serve the release.

    `settings` must have the addresses of the running stack. Raises PipelineError if the server
    gives no answer, or if the answer is not the result of a swap: it then does not come from the
    server of this state folder.
    """
    url, folder = settings.server_url(pipeline), home.releases_dir / pipeline.name
    # Mark the release as pending before the request. If the request finds no server, a server may
    # start right after the request. The new server then finds the mark and serves the release.
    earlier = set_pending(folder, release)
    try:
        result = request_swap(url, release, token=load_tokens(home.tokens_file).admin)
    except httpx.ConnectError:
        return None
    except httpx.TransportError as error:
        raise PipelineError(
            f"{url} gave no answer ({error!r}); the server will serve {release} at its next start"
        ) from None
    except SwapAnswerError as error:
        clear_pending(folder, release, earlier=earlier)
        raise PipelineError(
            f"the server on {url} is not the server of this state folder: {error}"
        ) from None
    # Clear the mark even if the swap failed. Otherwise the server would swap to this release when
    # it is restarted, perhaps days later.
    clear_pending(folder, release)
    return result


def in_words(result: SwapResult) -> str:
    if result.result != "live":
        return f"{result.result} in {result.phase}: {'; '.join(result.reasons)}"
    if result.previous == result.release:
        return f"{result.release} is already served"
    instead = "" if result.previous is None else f", instead of {result.previous}"
    return f"{result.release} is served{instead} ({sum(result.seconds.values()):.2f} s)"


def release_before(folder: Path) -> str:
    """The id of the release that a rollback serves; `pipeline releases rollback --help` says how it
    is chosen. folder: the pipeline's releases. Raises PipelineError if there is none, and
    ReleaseError if the record of what is served is damaged."""
    served = served_release(folder)
    if served is None:
        raise PipelineError("no release is served yet, so there is none to roll back from")
    number = release_number(served.name)
    older = [each.id for each in list_releases(folder) if release_number(each.id) < number]
    if not older:
        raise PipelineError(
            f"{served.name} is the oldest release, so there is none to roll back to; `releases ls` "
            "shows all releases"
        )
    try:
        parent = load_release(served).lineage.parent
    except ReleaseError as error:
        # A rollback must also work if the served release is damaged.
        logger.warning("%s; rolling back to an older release", error)
        parent = None
    # Choose only a release that is older than the served release. So a second rollback does not
    # undo the first rollback, but goes further back.
    choices = (*reversed(served_or_empty(folder).history), parent, older[-1])
    return next(choice for choice in choices if choice in older)
