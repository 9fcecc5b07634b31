"""Asks the stack's own hub for the newest commit of the branch that a pipeline follows."""

from urllib.parse import quote

import httpx

from pipeline.errors import PipelineError
from pipeline.paths import Home
from pipeline.settings import PipelineSettings, Settings
from pipeline.tokens import read_tokens


def newest_commit(home: Home, settings: Settings, pipeline: PipelineSettings) -> str | None:
    """The newest commit of the branch that the pipeline follows. None if the branch has no commit,
    if the stack's tokens cannot be read, if the hub does not answer, or if its answer names no
    commit."""
    # The name of a branch may contain a character that would end the URL's path, such as #.
    ref = quote(pipeline.ref, safe="")
    try:
        response = httpx.get(
            f"{settings.hub_url}/api/datasets/{pipeline.dataset}/revision/{ref}",
            headers={"Authorization": f"Bearer {read_tokens(home.tokens_file).hub}"},
            timeout=5,
            trust_env=False,
        )
        sha: str | None = response.json()["sha"] if response.is_success else None
    except PipelineError:
        return None  # the tokens cannot be read
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None  # the hub does not answer, or another program answers on its port
    return sha
