"""Asks the completion server of a pipeline to serve another release, and prints the result."""

import json
from typing import TYPE_CHECKING

import typer

from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.settings import PipelineSettings
    from serving.swap_schemas import SwapResult


def swap_in(pipeline: "PipelineSettings", release: str, *, as_json: bool) -> None:
    """Make the server serve the release, and print the result. If no server is up, the next server
    that starts will serve the release.

    If the swap fails, the server answers with the reason, and this function raises a `typer.Exit`
    with exit code 1. Raises PipelineError if the server gives no answer. Also raises PipelineError
    if the answer is not the result of a swap: the answer then does not come from the server of this
    state folder.
    """
    import httpx

    from pipeline.going_back import record_going_back
    from pipeline.stack_record import running_settings
    from pipeline.tokens import load_tokens
    from serving.errors import SwapAnswerError
    from serving.swap_schemas import request_swap
    from serving.weights.release_store import clear_pending, served_release_id, set_pending

    home = Home.find()
    settings = running_settings(home)
    url = settings.server_url(settings.pipeline(pipeline.name))
    folder = home.releases_dir / pipeline.name
    former = served_release_id(folder)
    # Mark the release as pending before the request. If the request finds no server, a server may
    # start right after the request. The new server then finds the mark and serves the release.
    earlier = set_pending(folder, release)
    try:
        result = request_swap(url, release, admin_token=load_tokens(home.tokens_file).admin)
    except httpx.ConnectError:
        record_going_back(folder, former, release)
        if as_json:
            print(json.dumps({"result": "pending", "release": release}))
        else:
            print(f"no server is up on {url}; the next server that starts will serve {release}")
        return
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
    if result.result == "live":
        record_going_back(folder, former, release)
    print(result.model_dump_json() if as_json else _in_words(result))
    if result.result != "live":
        raise typer.Exit(1)


def _in_words(result: "SwapResult") -> str:
    if result.result != "live":
        return f"{result.result} in {result.phase}: {'; '.join(result.reasons)}"
    if result.previous == result.release:
        return f"{result.release} is already served"
    instead = "" if result.previous is None else f", instead of {result.previous}"
    return f"{result.release} is served{instead} ({sum(result.seconds.values()):.2f} s)"
