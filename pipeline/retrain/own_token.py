"""The user's own Hugging Face token, for all hubs except the stack's own hub. In a job, `HF_TOKEN`
is the token for the stack's hub."""

from collections.abc import Mapping
from pathlib import Path

OWN_TOKEN = "OWN_HF_TOKEN"
"""The environment variable in which a job finds the user's own token."""

OWN_TOKEN_SOURCE = "HF_TOKEN of the shell that started the stack, or the token of `hf auth login`"


def own_token(environ: Mapping[str, str], stack_token: str) -> str | None:
    """`HF_TOKEN` of the shell. If this is missing or is the stack's token, the token that `hf auth
    login` stored."""
    token = environ.get("HF_TOKEN")
    return token if token and token != stack_token else cached_login()


def cached_login() -> str | None:
    """The token that `hf auth login` stored."""
    from huggingface_hub import constants

    try:
        return Path(constants.HF_TOKEN_PATH).read_text().strip() or None
    except OSError:
        return None
