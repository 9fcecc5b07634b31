"""Asks the server of a pipeline what it serves, and to serve another release."""

import json
from typing import TYPE_CHECKING

import typer

from pipeline.errors import PipelineError
from pipeline.paths import Home

if TYPE_CHECKING:
    from pipeline.settings import PipelineSettings
    from serving.swap_schemas import SwapResult


def swap_in(pipeline: "PipelineSettings", release: str, *, as_json: bool) -> None:
    """Have the release served, and print what came of it; without a server, leave it for the next.

    Ends the command with 1 where the server did not take it.
    """
    import httpx
    from pydantic import ValidationError

    from pipeline.settings import load_settings
    from pipeline.tokens import load_tokens
    from serving.swap_schemas import SwapRequest, SwapResult
    from serving.weights.releases import clear_pending, set_pending

    home = Home.find()
    url, folder = load_settings().server_url(pipeline), home.releases_dir / pipeline.name
    # The marker comes first: a server that starts after the attempt finds the release by it.
    set_pending(folder, release)
    try:
        response = httpx.post(
            f"{url}/admin/swap",
            json=SwapRequest(release=release).model_dump(),
            headers={"Authorization": f"Bearer {load_tokens(home.tokens_file).admin}"},
            timeout=600,
            trust_env=False,
        )
    except httpx.ConnectError:
        if as_json:
            print(json.dumps({"result": "pending", "release": release}))
        else:
            print(f"no server is up on {url}; the next one to start will serve {release}")
        return
    except httpx.TransportError as error:
        raise PipelineError(
            f"{url} gave no answer ({error!r}); it serves {release} at its next start"
        ) from None
    # Whatever the answer: nobody expects another release of a later restart.
    clear_pending(folder, release)
    try:
        result = SwapResult.model_validate_json(response.content)
    except ValidationError:
        raise PipelineError(
            f"{url} is not the server of this state folder: it answered {response.status_code}, "
            f"{response.text[:300].strip() or '(nothing)'}"
        ) from None
    print(result.model_dump_json() if as_json else _in_words(result))
    if result.result != "live":
        raise typer.Exit(1)


def _in_words(result: "SwapResult") -> str:
    if result.result != "live":
        return f"{result.result} in {result.phase}: {'; '.join(result.reasons)}"
    if not result.seconds:
        return f"{result.release} is served already"
    is_first = result.previous in (None, result.release)
    instead = "" if is_first else f", instead of {result.previous}"
    return f"{result.release} is served{instead} ({sum(result.seconds.values()):.2f} s)"
