"""The user's own token, for hubs other than the stack's. In a job, `HF_TOKEN` is the stack's."""

from collections.abc import Mapping
from pathlib import Path

OWN_TOKEN = "OWN_HF_TOKEN"
"""The variable of a job in which the runner passes on `HF_TOKEN` of the shell that started it."""

OWN_TOKEN_SOURCE = "HF_TOKEN of the shell that started the stack, or the token of `hf auth login`"


def own_token(environ: Mapping[str, str], stack_token: str) -> str | None:
    """`HF_TOKEN` of the shell, unless it is the stack's, else the token of `hf auth login`."""
    token = environ.get("HF_TOKEN")
    return token if token and token != stack_token else cached_login()


def cached_login() -> str | None:
    """The token that `hf auth login` stored."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text().strip() or None
    except OSError:
        return None
